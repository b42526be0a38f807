"""Adapt converted schemas to llguidance.

llguidance compares the names of properties with the text as written. In an open object it would admit the key
`\\u0061`, spelled with an escape, although the schema restricts the property `a`. In a key that matches a pattern it
admits no escapes, so an open object becomes an object whose other keys match a pattern. llguidance enforces
minProperties and maxProperties only in objects without optional properties, admits 29 February in every year, and
rounds bounds to doubles.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from infd.errors import shorten
from infd.grammar.schema.algebra import ALTERNATIVES
from infd.grammar.schema.patterns import other_than, unmatched
from infd.grammar.schema.refusals import Unlocated
from infd.grammar.schema.shapes import KEYWORD_TYPES, OTHERS, Inexpressible, atoms_of_leaf, names_of

if TYPE_CHECKING:
    from infd.grammar.schema.languages import Languages
    from infd.grammar.schema.negation import Negation
    from infd.grammar.schema.shapes import Schema

_EXACT = 2**53  # every integer of a smaller magnitude is a double
# A date from year 1 on, with 29 February in leap years only. llguidance's formats admit 29 February in every year. They
# also admit the year 0, which many libraries reject.
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_DAYS = (
    f"^({_YEAR}-(0[13-9]|1)|{_YEAR}-02-([01]|2[0-8])"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)


class Hardening:
    """Adapts schemas whose definitions are all converted."""

    def __init__(self, negation: Negation) -> None:
        self._negation = negation
        self._algebra = negation.algebra

    def harden(self, schema: Schema, *, sealed: bool = False) -> Schema:
        """Return a schema that llguidance enforces exactly.

        sealed  whether another schema of the conjunction constrains the keys that this schema does not name

        Raises GrammarFailed.
        """
        if isinstance(schema, bool) or "$ref" in schema:
            return schema
        if "oneOf" in schema:
            return self.harden(self._negation.exclusive(schema), sealed=sealed)
        if "anyOf" in schema:
            return self._algebra.disjunction([self.harden(s, sealed=sealed) for s in schema["anyOf"]])
        if "allOf" in schema:
            return self._conjunction(schema["allOf"], sealed=sealed)
        leaf = _with_double_bounds(schema)
        if leaf.keys() & {"notIn", "notPrefix"}:
            pattern = {"pattern": other_than(leaf.pop("notIn", ()), leaf.pop("notPrefix", ()))}
            if "pattern" not in leaf:
                return {**leaf, **pattern}
            return self._algebra.conjunction([self.harden(leaf, sealed=sealed), pattern])
        if leaf.get("format") in ("date", "date-time") and leaf.get("pattern") != _LEAP_DAYS:
            leap = {"pattern": _LEAP_DAYS}
            if "pattern" not in leaf:
                return {**leaf, **leap}
            return self._algebra.conjunction([leaf, leap | {"format": leaf["format"]}])
        for keyword in ("properties", "patternProperties"):
            if keyword in leaf:
                leaf[keyword] = {k: self.harden(s) for k, s in leaf[keyword].items()}
        for keyword in ("items", OTHERS):
            if keyword in leaf:
                leaf[keyword] = self.harden(leaf[keyword])
        if "prefixItems" in leaf:
            leaf["prefixItems"] = [self.harden(s) for s in leaf["prefixItems"]]
        if "object" not in atoms_of_leaf(leaf):
            return leaf
        return self._counted(_sealed(leaf, self._algebra.languages, sealed=sealed))

    def _conjunction(self, parts: list[Schema], *, sealed: bool) -> Schema:
        closing = [_constrains_other_keys(self._algebra.resolved(s)) for s in parts]
        if any(closing):  # only the parts that constrain unlisted keys may close the object to all remaining keys
            resolved = [s if own else self._algebra.resolved(s) for s, own in zip(parts, closing, strict=True)]
            parts = [s if r is None else r for s, r in zip(parts, resolved, strict=True)]
        return self._algebra.conjunction(
            [self.harden(s, sealed=sealed or (any(closing) and not own)) for s, own in zip(parts, closing, strict=True)]
        )

    def _counted(self, leaf: dict[str, Any]) -> Schema:
        """Replace minProperties and maxProperties by alternatives that each require or forbid optional properties."""
        least, most = leaf.get("minProperties", 0), leaf.get("maxProperties")
        required = leaf.get("required", [])
        optional = [n for n, s in leaf.get("properties", {}).items() if s is not False and n not in required]
        if most is not None and most < max(least, len(required)):
            return _without_objects(leaf)
        if least <= len(required):
            leaf.pop("minProperties", None)
            least = 0
        keys = self._algebra.keys(leaf)
        if keys is not None and most is not None and most >= len(keys):
            leaf.pop("maxProperties", None)
            most = None
        if not least and most is None:
            return leaf
        if keys is None and least > len(required) + 1:
            # llguidance admits the same key twice if only a pattern matches the key, and counts two properties.
            message = "minProperties of properties that are not listed is kept only for one more than required"
            raise Unlocated(message, code="unsupported_grammar")
        if keys is None and not optional:
            return leaf
        bare = {k: v for k, v in leaf.items() if k not in ("minProperties", "maxProperties")}
        wanted = max(0, least - len(required))
        limit = len(optional) if most is None else min(len(optional), most - len(required))
        if wanted > len(optional) and keys is not None:
            return _without_objects(leaf)
        sizes = [wanted] if most is None else range(wanted, limit + 1)
        chosen = [c for n in sizes for c in itertools.islice(itertools.combinations(optional, n), ALTERNATIVES + 1)]
        if len(chosen) > ALTERNATIVES:
            raise Unlocated("minProperties or maxProperties leave too many choices", code="grammar_too_large")
        options = []
        for names in chosen:
            properties = dict(bare["properties"])
            if most is not None:
                properties |= {n: False for n in optional if n not in names}
            option = {**bare, "properties": properties}
            if required or names:
                option["required"] = [*required, *names]
            if keys is None and most is not None:
                option["maxProperties"] = most
            options.append(option)
        if keys is None and wanted:
            options.append({**leaf, "properties": {**bare["properties"], **dict.fromkeys(optional, False)}})
        return self._algebra.disjunction(options)


def _constrains_other_keys(schema: Schema) -> bool:
    """Return whether a leaf constrains properties that its `properties` do not list."""
    return isinstance(schema, dict) and (schema.get(OTHERS, True) is not True or "patternProperties" in schema)


def _sealed(leaf: dict[str, Any], languages: Languages, *, sealed: bool) -> dict[str, Any]:
    """Change an object's leaf so that no key spelled with escapes evades the leaf; return the leaf.

    A pattern then matches the keys that neither properties nor patterns name. If `sealed`, as in `harden`, a leaf that
    does not constrain these keys gets no such pattern. Raises Unlocated for unsupported patterns.
    """
    others, patterns = leaf.get(OTHERS, True), leaf.get("patternProperties", {})
    names = [
        *leaf.get("properties", ()),
        *(r for r in leaf.get("required", ()) if r not in leaf.get("properties", {})),
    ]
    if others is True and all(s is True for s in patterns.values()):
        leaf.pop("patternProperties", None)
        if names and not sealed:
            leaf |= {"patternProperties": {"": True}, OTHERS: False}
    elif others is not False and (names or patterns):
        rest = unmatched(list(patterns), names)
        unlisted = [n for n in names if n not in leaf.get("properties", {})]
        matched = {n: [languages.matches(p, n) for p in patterns] for n in unlisted}
        unknown = rest is None or any(None in each for each in matched.values())
        if unknown or (others is not True and rest and any(languages.matches(rest, n) is not False for n in names)):
            message = f"patternProperties {shorten(str(list(patterns)))} beside other properties is not kept"
            raise Unlocated(message, code="unsupported_grammar")
        if free := [n for n, each in matched.items() if not any(each)]:
            leaf["properties"] = {**leaf.get("properties", {}), **dict.fromkeys(free, others)}
        leaf |= {"patternProperties": {**patterns, rest: others} if rest else patterns, OTHERS: False}
    return leaf


def _with_double_bounds(leaf: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a leaf in which bounds of magnitude 2**53 or more are rounded inwards to doubles.

    llguidance would round these bounds to the nearest double, which may admit values beyond the bound.
    """
    leaf = dict(leaf)
    for side, outwards in (("inimum", -math.inf), ("aximum", math.inf)):
        inclusive, exclusive = "m" + side, "exclusiveM" + side
        for keyword in (exclusive, inclusive):
            if abs(leaf.get(keyword, 0)) < _EXACT:
                continue
            value = leaf.pop(keyword)
            double = float(value)
            outside = double < value if outwards < 0 else double > value
            if outside or (double == value and keyword == exclusive):
                double = math.nextafter(double, -outwards)
            known = leaf.get(inclusive, double)
            tighter = max(known, double) if outwards < 0 else min(known, double)
            leaf[inclusive] = int(tighter) if tighter == double else tighter
    return leaf


def _without_objects(leaf: dict[str, Any]) -> Schema:
    try:
        names = names_of(atoms_of_leaf(leaf) - {"object"})
    except Inexpressible:
        return False
    rest = {k: v for k, v in leaf.items() if "object" not in KEYWORD_TYPES.get(k, ())}
    return {**rest, "type": names} if names else False
