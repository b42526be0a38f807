"""Rewrite a client's JSON Schema into the keywords that the engine keeps exactly, or refuse it by path.

The result is of draft 2020-12 and accepts the same documents as the client's schema, whose draft `$schema` names. It
holds `$ref`, `anyOf`, `allOf`, `type`, `enum`, and the bounds, patterns, formats, items and properties of one type.
`oneOf`, `not`, `if` and the dependencies become alternatives: a negation is pushed inwards until it is a type, a bound,
a list of values or an absent property. Where a negation has no such form, or an array's items must differ and are not
enumerated, the schema is refused: GrammarFailed names the JSON pointer and the keyword.

A key or a string can be spelled with escapes. The engine compares names of properties with the text as written, but
admits `\\u0061` in a key that no property or pattern names; so an open object becomes one whose other keys match a
pattern, in which the engine admits no such escape.

Formats that the engine does not know are annotations, as the specification has them.
Sources: JSON Schema drafts 4 to 2020-12.
"""

from __future__ import annotations

import itertools
import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from infd.errors import shorten
from infd.grammar.patterns import kept_pattern, other_than, unmatched, without_prefixes
from infd.grammar.refusals import failed, invalid, pointer

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    from infd.grammar.refusals import Path

# A converted schema is True, False, or a dict of one of these shapes: {"$ref": name}, {"allOf": [...]},
# {"anyOf": [...]}, {"oneOf": [...], "beside": ..., "at": path}, or a leaf: type, enum and the keywords of
# KEYWORD_TYPES. `notIn` lists excluded strings; `notPrefix` lists prefixes, and excludes every string with
# a listed prefix. Both are finally converted to a `pattern`.
Schema = Any

DRAFTS = {"draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019, "2020-12": 2020}
TYPES = {
    "null": frozenset({"null"}),
    "boolean": frozenset({"boolean"}),
    "integer": frozenset({"integer"}),
    "number": frozenset({"integer", "fraction"}),
    "string": frozenset({"string"}),
    "array": frozenset({"array"}),
    "object": frozenset({"object"}),
}
ALL = frozenset().union(*TYPES.values())
NUMBER = TYPES["number"]
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
# Dates from year 1 on with 29 February in leap years only. llguidance's formats have that day in every year, and a year
# 0, which many libraries' dates lack.
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_DAYS = (
    f"^({_YEAR}-(0[13-9]|1)|{_YEAR}-02-([01]|2[0-8])"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
KEYWORD_TYPES = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "notIn", "notPrefix"), frozenset({"string"})),
    **dict.fromkeys(("prefixItems", "items", "minItems", "maxItems"), frozenset({"array"})),
    **dict.fromkeys(
        ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        frozenset({"object"}),
    ),
}
SINCE = {  # drafts before these ignore the keyword
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "minContains"), 2019
    ),
    **dict.fromkeys(("maxContains", "$anchor", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef", "$dynamicAnchor"), 2020),
}
ALTERNATIVES = 64  # most of one expansion
ARRANGEMENTS = 2000  # arrays that uniqueItems may become
NODES = 50_000  # of the result
STEPS = 200_000
NESTED = 12  # definitions converted one within another; further ones wait
RESOLVED = 12  # $refs followed to prove two schemas disjoint
OTHERS = "additionalProperties"


def prepare(schema: Any) -> Schema:
    """Return an equivalent schema of the keywords that the engine keeps.

    Takes milliseconds for schemas of some KB; `schema` is not changed.

    Raises GrammarFailed: invalid_grammar if it is no schema, unsupported_grammar if it cannot be kept exactly,
    grammar_too_large if rewriting would multiply it.
    """
    try:
        return _Rewriting(schema).result()
    except RecursionError:
        raise failed((), "it is nested too deep to be rewritten", "grammar_too_large") from None
    except _Unkept as unkept:
        raise failed((), f"{unkept} cannot be kept apart") from None


class _Unkept(Exception):  # becomes GrammarFailed once the path is known
    """A negation has no form in the engine's keywords."""


def _type_of(value: Any) -> str:
    """Return the atomic type of a JSON value: one of ALL."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _key(value: Any) -> Any:
    """Return a hashable that is equal for JSON values that JSON Schema holds equal: 1 and 1.0, but not 1 and true."""
    match value:
        case bool() | None | str():
            return (_type_of(value), value)
        case int() | float():
            return ("number", value)
        case list() | tuple():
            return ("array", tuple(_key(v) for v in value))
    return ("object", frozenset((k, _key(v)) for k, v in value.items()))


def _among(schemas: list[Any], schema: Any) -> bool:
    """Return whether a list holds a schema. Python's `in` would find an enum of 1 among enums of true."""
    return any(other == schema and _key(other) == _key(schema) for other in schemas)


def _named(atoms: frozenset[str]) -> list[str]:
    """Return atomic types as the `type` keyword's names. Raises _Unkept for numbers that are no integers."""
    if "fraction" in atoms and "integer" not in atoms:
        raise _Unkept("numbers that are not integers")
    return [t for t, a in TYPES.items() if a <= atoms and not (t == "integer" and "fraction" in atoms)]


class _Rewriting:
    """One schema's way into the engine's keywords."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._draft = 2020
        self._names: dict[str, str] = {}  # a pointer into the client's schema -> name of its definition
        self._definitions: dict[str, Schema] = {}
        self._unfinished: set[str] = set()
        self._waiting: list[tuple[str, Any, Path]] = []
        self._nested = 0  # definitions under conversion
        self._made = 0  # alternatives so far
        self._steps = 0  # schemas looked at so far

    def result(self) -> Schema:
        if isinstance(self._root, dict):
            self._draft = _draft_of(self._root)
        root = self._convert(self._root, ())
        while self._waiting:
            self._define(*self._waiting.pop())
        root = self._harden(root, ())
        if root is False:
            raise failed((), "no document satisfies it")
        if root is True:
            return {}
        out = dict(root) if isinstance(root, dict) else {}
        reached: dict[str, Schema] = {}
        open_ = [out]
        while open_:
            for name in _refs(open_.pop()):
                if name not in reached:
                    reached[name] = self._harden(self._definitions[name], ())
                    open_.append(reached[name])
        if (endless := _endless(reached)) is not None:
            place = next(p for p, name in self._names.items() if name == endless)
            raise failed((), f"{place} refers to itself in every document, which never ends")
        nodes = _count(out) + sum(_count(s) for s in reached.values())
        if nodes > NODES:
            raise failed((), f"rewritten it has {nodes} parts, of at most {NODES}", "grammar_too_large")
        out = _linked(out)
        if reached:
            out["$defs"] = {name: _linked(s) for name, s in reached.items()}
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **out}

    # The client's schema, node by node.

    def _convert(self, node: Any, path: Path) -> Schema:
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise invalid(path, "a schema is an object or a boolean")
        node = {k: v for k, v in node.items() if SINCE.get(k, 0) <= self._draft}
        identified = "id" if self._draft == 4 else "$id"
        embedded = path and isinstance(node.get(identified), str) and not node[identified].startswith("#")
        if embedded and next(_find(node, "$ref"), None) is not None:
            # The engine resolves a $ref beside a $id against the $id, which drafts up to 7 ignore.
            raise failed((*path, identified), f"references inside a schema with {identified} are not followed")
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in node:
                raise failed((*path, keyword), f"{keyword} is not supported")
        if "$ref" in node and self._draft <= 7:
            node = {"$ref": node["$ref"]}
        leaf = self._leaf(node, path)
        parts = [leaf]
        if "$ref" in node:
            parts.append({"$ref": self._definition(node["$ref"], (*path, "$ref"))})
        for keyword, convert in (
            ("allOf", self._all_of),
            ("anyOf", self._any_of),
            ("oneOf", self._one_of),
            ("not", self._not),
            ("if", self._if),
            ("dependencies", self._dependencies),
            ("dependentRequired", self._dependencies),
            ("dependentSchemas", self._dependencies),
            ("propertyNames", self._property_names),
            ("contains", self._contains),
        ):
            if keyword in node:
                try:
                    parts += convert(node, (*path, keyword), self._both(parts))
                except _Unkept as unkept:
                    raise failed((*path, keyword), f"{keyword} would need the opposite of {unkept}") from None
        if node.get("uniqueItems") is True:
            parts = self._unique_items(parts, (*path, "uniqueItems"))
        if "unevaluatedProperties" in node and OTHERS not in node:
            try:
                parts = [self._unevaluated_properties(node, path)]
            except _Unkept as unkept:
                raise failed((*path, "unevaluatedProperties"), f"it would need the opposite of {unkept}") from None
        everything = "additionalItems" if isinstance(node.get("items"), list) else "items"
        if "unevaluatedItems" in node and node["unevaluatedItems"] is not True and everything not in node:
            if any(k in node for k in ("$ref", "allOf", "anyOf", "oneOf", "if", "contains", "not", "dependentSchemas")):
                raise failed((*path, "unevaluatedItems"), "unevaluatedItems beside other applicators is not supported")
            rest = self._convert(node["unevaluatedItems"], (*path, "unevaluatedItems"))
            parts.append(
                {"items": rest, **({"prefixItems": leaf["prefixItems"]} if "prefixItems" in _dict(leaf) else {})}
            )
        return self._both(self._multiplied(parts))

    def _multiplied(self, parts: list[Schema]) -> list[Schema]:
        """Join disjunctions whose alternatives exclude each other, as those of `if` on one property.

        The engine would multiply them all before it sees which are empty.
        """
        found: list[Schema] = []
        for part in parts:
            last = found[-1] if found else True
            one, other = _dict(last).get("anyOf", []), _dict(part).get("anyOf", [])
            if one and other and len(one) * len(other) <= ALTERNATIVES**2:
                both = [b for x in one for y in other if (b := self._both([x, y])) is not False]
                if len(both) <= len(one) + len(other):
                    found[-1] = self._either(both)
                    continue
            found.append(part)
        return found

    def _leaf(self, node: dict[str, Any], path: Path) -> Schema:
        leaf: dict[str, Any] = {}
        if "type" in node:
            names = node["type"] if isinstance(node["type"], list) else [node["type"]]
            if not names or not all(isinstance(n, str) and n in TYPES for n in names):
                raise invalid((*path, "type"), f"{shorten(str(node['type']))} is no type")
            leaf["type"] = _named(frozenset().union(*(TYPES[n] for n in names)))
        if "enum" in node:
            if not isinstance(node["enum"], list):
                raise invalid((*path, "enum"), "enum is an array")
            leaf["enum"] = list({_key(v): v for v in node["enum"]}.values())
        if "const" in node:
            values = {_key(v) for v in leaf.get("enum", [node["const"]])}
            leaf["enum"] = [node["const"]] if _key(node["const"]) in values else []
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            self._number(node, leaf, keyword, path)
        for keyword in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            if keyword in node:
                count = _whole(node[keyword], keyword, path)
                if not (count == 0 and keyword.startswith("min")):
                    leaf[keyword] = count
        if "pattern" in node:
            pattern, prefixes = without_prefixes(node["pattern"])
            if prefixes:
                leaf["notPrefix"] = prefixes
            leaf["pattern"] = kept_pattern(pattern, (*path, "pattern"))
        if not isinstance(format := node.get("format", ""), str):
            raise invalid((*path, "format"), "format is a string")
        if format in FORMATS:
            leaf["format"] = format
        self._items(node, leaf, path)
        self._properties(node, leaf, path)
        if "enum" in leaf:
            atoms = _atoms_of_leaf({k: v for k, v in leaf.items() if k != "enum"})
            leaf["enum"] = [v for v in leaf["enum"] if _type_of(v) in atoms]
            rest = {k: v for k, v in leaf.items() if k != "enum"}
            leaf["enum"] = [v for v in leaf["enum"] if self._accepts(rest, v) is not False]
            if not leaf["enum"]:
                return False
            if all(self._accepts(rest, v) for v in leaf["enum"]):
                leaf = {"enum": leaf["enum"]}
        return leaf or True

    def _number(self, node: dict[str, Any], leaf: dict[str, Any], keyword: str, path: Path) -> None:
        if keyword not in node:
            return
        value = node[keyword]
        if isinstance(value, bool) and self._draft == 4 and keyword.startswith("exclusive"):
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if value and bound in leaf:
                leaf[keyword] = leaf.pop(bound)
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid((*path, keyword), f"{keyword} is a number")
        if keyword == "multipleOf" and value <= 0:
            raise invalid((*path, keyword), "multipleOf is above 0")
        if abs(value) >= 2**63:
            raise failed((*path, keyword), "bounds beyond 64 bits are not supported")
        leaf[keyword] = value

    def _items(self, node: dict[str, Any], leaf: dict[str, Any], path: Path) -> None:
        items, prefix, rest = node.get("items", True), node.get("prefixItems", []), "items"
        if isinstance(items, list):
            prefix, items, rest = items, node.get("additionalItems", True), "additionalItems"
        if not isinstance(prefix, list):
            raise invalid((*path, "prefixItems"), "prefixItems is an array")
        first = "prefixItems" if rest == "items" else "items"
        if prefix:
            leaf["prefixItems"] = [self._convert(s, (*path, first, i)) for i, s in enumerate(prefix)]
        if (converted := self._convert(items, (*path, rest))) is not True:
            leaf["items"] = converted

    def _properties(self, node: dict[str, Any], leaf: dict[str, Any], path: Path) -> None:
        for keyword in ("properties", "patternProperties"):
            named = node.get(keyword, {})
            if not isinstance(named, dict):
                raise invalid((*path, keyword), f"{keyword} is an object")
            if named:
                leaf[keyword] = {k: self._convert(s, (*path, keyword, k)) for k, s in named.items()}
        if "patternProperties" in leaf:
            at = (*path, "patternProperties")
            leaf["patternProperties"] = {kept_pattern(p, (*at, p)): s for p, s in leaf["patternProperties"].items()}
        if (others := self._convert(node.get(OTHERS, True), (*path, OTHERS))) is not True:
            leaf[OTHERS] = others
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
            raise invalid((*path, "required"), "required is an array of strings")
        if required:
            leaf["required"] = list(dict.fromkeys(required))
        if any(self._dead(leaf, r) for r in leaf.get("required", ())):
            leaf.clear()
            leaf["type"] = _named(_atoms_of_leaf({"type": node.get("type", list(TYPES))}) - {"object"})

    @staticmethod
    def _dead(leaf: dict[str, Any], name: str) -> bool:
        if name in leaf.get("properties", {}):
            return leaf["properties"][name] is False
        return leaf.get(OTHERS) is False and "patternProperties" not in leaf

    # References.

    def _definition(self, reference: Any, path: Path) -> str:
        """Return the name of the definition made of a $ref's target."""
        if not isinstance(reference, str):
            raise invalid(path, "$ref is a string")
        base = self._root.get("id" if self._draft == 4 else "$id") if isinstance(self._root, dict) else None
        document, _, fragment = reference.partition("#")
        if document and document != (base.rstrip("#") if isinstance(base, str) else None):
            raise failed(path, f"{shorten(reference)} is not in this schema, and nothing is fetched")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            target, at = self._anchor(fragment, path)
        else:
            target, at = self._root, ()
            for part in fragment.split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                    target = target[int(key)]
                elif isinstance(target, dict) and key in target:
                    target = target[key]
                else:
                    raise invalid(path, f"{shorten(reference)} names nothing in this schema")
                at = (*at, key)
        where = pointer(at)
        if where not in self._names:
            name = self._names[where] = str(len(self._names))
            self._unfinished.add(name)
            if self._nested < NESTED:
                self._define(name, target, at)
            else:
                self._waiting.append((name, target, at))
        return self._names[where]

    def _define(self, name: str, target: Any, at: Path) -> None:
        self._nested += 1
        self._definitions[name] = self._convert(target, at)
        self._nested -= 1
        self._unfinished.discard(name)

    def _anchor(self, name: str, path: Path) -> tuple[Any, Path]:
        keyword, value = ("$anchor", name) if self._draft >= 2019 else ("id" if self._draft == 4 else "$id", "#" + name)
        found = [(n, p) for n, p in _find(self._root, keyword) if n[keyword] == value]
        if len(found) != 1:
            raise failed(path, f"{len(found)} schemas have the name #{shorten(name)}")
        return found[0]

    def _step(self, number: int = 1) -> None:
        """Bound the time: 200,000 steps take about 0.3 s."""
        self._steps += number
        if self._steps > STEPS:
            raise failed((), "its alternatives are too many to be told apart", "grammar_too_large")

    def _resolved(self, schema: Schema) -> Schema:
        """Return the schema behind $refs; None while that is being converted."""
        self._step()
        for _ in range(RESOLVED):
            if not (isinstance(schema, dict) and "$ref" in schema):
                return schema
            if schema["$ref"] in self._unfinished:
                return None
            schema = self._definitions[schema["$ref"]]
        return None

    # Applicators. Each returns further parts of the conjunction; `beside` is the conjunction so far.

    def _several(self, node: dict[str, Any], path: Path) -> list[Schema]:
        several = node[str(path[-1])]
        if not isinstance(several, list) or not several:
            raise invalid(path, f"{path[-1]} is an array of schemas")
        return [self._convert(s, (*path, i)) for i, s in enumerate(several)]

    def _all_of(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        return self._several(node, path)

    def _any_of(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        return [self._either(self._several(node, path))]

    def _one_of(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        """Leave the alternatives together until every reference is converted; `_alone` parts them."""
        options = self._several(node, path)
        return [{"oneOf": options, "beside": beside, "at": path}] if len(options) > 1 else options

    def _alone(self, schema: dict[str, Any]) -> Schema:
        """Return a oneOf as an anyOf of disjoint alternatives."""
        return self._either(self._exactly(schema["oneOf"], schema["beside"], schema["at"]))

    def _exactly(self, options: list[Schema], beside: Schema, path: Path) -> list[Schema]:
        alone, whole_options = [], options
        options = list(options)
        for i, option in enumerate(whole_options):
            whole = self._both([beside, option])
            for j, other in enumerate(whole_options):
                if i != j and option is not False and not self._disjoint(whole, other):
                    try:
                        without = self._negated(other, whole)
                    except _Unkept as unkept:
                        message = f"alternatives {i} and {j} overlap, and the opposite of {unkept} cannot be kept"
                        raise failed(path, message) from None
                    options[i] = self._both([options[i], self._either(without)])
                    whole = self._both([beside, options[i]])
            alone.append(options[i])
        return alone

    def _not(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        return [self._either(self._negated(self._convert(node["not"], path), beside))]

    def _if(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        then, other = (self._convert(node.get(k, True), (*path[:-1], k)) for k in ("then", "else"))
        if then is True and other is True:
            return []
        condition = self._convert(node["if"], path)
        holds = self._both([condition, then])  # not `then` alone: alternatives that exclude each other multiply to few
        fails = self._both([self._either(self._negated(condition, self._both([beside, other]))), other])
        return [self._either([holds, fails])]

    def _dependencies(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        dependencies = node[str(path[-1])]
        if not isinstance(dependencies, dict):
            raise invalid(path, f"{path[-1]} is an object")
        parts = []
        for name, needed in dependencies.items():
            required = [needed] if isinstance(needed, str) else needed
            then = self._convert({"required": required} if isinstance(required, list) else needed, (*path, name))
            if then is True or self._atoms(beside).isdisjoint({"object"}):
                continue
            if name in _dict(beside).get("required", ()) and self._atoms(beside) == {"object"}:
                parts.append(then)
                continue
            if len(dependencies) > 1 and _dict(then).keys() == {"properties"} and len(then["properties"]) == 1:
                # Alternatives by the other property's value: those of several dependencies exclude each other.
                with suppress(_Unkept):
                    without = self._either(self._negated(then, True))
                    parts.append(self._either([then, self._both([without, {"properties": {name: False}}])]))
                    continue
            present = {"type": ["object"], "required": [name]}
            parts.append(self._either([{"properties": {name: False}}, self._both([present, then])]))
        return parts

    def _property_names(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        names = self._resolved(self._convert(node["propertyNames"], path))
        if names is None:
            raise failed(path, "propertyNames that refers to itself is not supported")
        if names is True:
            return []
        if names is False or "string" not in self._atoms(names):
            return [{OTHERS: False, "properties": dict.fromkeys(_dict(beside).get("properties", {}), False)}]
        kept = set(_dict(names)) - {"type"}
        if kept == {"enum"}:
            return [{"properties": {v: True for v in names["enum"] if isinstance(v, str)}, OTHERS: False}]
        if not kept:
            return []
        if kept == {"pattern"}:
            pattern = names["pattern"]
        elif kept <= {"minLength", "maxLength"}:
            pattern = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
        else:
            raise failed(path, "propertyNames is kept as an enum, a pattern or bounds of length")
        return [{"patternProperties": {pattern: True}, OTHERS: False}]

    def _contains(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        least = _whole(node.get("minContains", 1), "minContains", path[:-1])
        most = None if "maxContains" not in node else _whole(node["maxContains"], "maxContains", path[:-1])
        wanted = self._convert(node["contains"], path)
        if (least == 0 and most is None) or "array" not in self._atoms(beside):
            return []
        leaf = next((p for p in _parts(beside) if "maxItems" in p or p.get("items") is False), {})
        length = leaf.get("maxItems", len(leaf.get("prefixItems", ())) if leaf.get("items") is False else None)
        if wanted is True:
            return [{k: v for k, v in (("minItems", least), ("maxItems", most)) if v is not None}]
        if least == 0 and most == 0:
            return [{"items": self._either(self._negated(wanted, True))}]
        if length is None:
            raise failed(path, "contains is kept only beside maxItems")
        rest = self._atoms(beside) - {"array"}
        others = [{"type": _named(rest)}] if rest else []
        if most is None:
            if length > ALTERNATIVES or math.comb(length, least) > ALTERNATIVES:
                raise failed(path, "contains has too many positions to choose from", "grammar_too_large")
            chosen = itertools.combinations(range(length), least)
            return [self._either([*others, *(self._at(c, wanted, True, c[-1] + 1) for c in chosen)])]
        if length > ALTERNATIVES or 2**length > ALTERNATIVES:
            raise failed(path, "contains has too many positions to choose from", "grammar_too_large")
        unwanted = self._either(self._negated(wanted, True))
        return [
            self._either(
                [
                    *others,
                    *(
                        self._at(c, wanted, unwanted, (c[-1] + 1) if c else 0)
                        for n in range(least, min(most, length) + 1)
                        for c in itertools.combinations(range(length), n)
                    ),
                ]
            )
        ]

    @staticmethod
    def _at(chosen: tuple[int, ...], wanted: Schema, unwanted: Schema, least: int) -> Schema:
        """Arrays with `wanted` at the chosen positions and `unwanted` at all others."""
        leaf: dict[str, Any] = {
            "type": ["array"],
            "prefixItems": [wanted if i in chosen else unwanted for i in range(least)],
        }
        return {**leaf, "minItems": least, "items": unwanted} if unwanted is not True else {**leaf, "minItems": least}

    def _unique_items(self, parts: list[Schema], path: Path) -> list[Schema]:
        """Return the parts of a conjunction whose arrays have no two equal items."""
        beside = self._both(parts)
        if "array" not in self._atoms(beside):
            return parts
        leaves = [p for p in _parts(beside) if p.keys() & {"items", "prefixItems", "maxItems", "minItems", "enum"}]
        most = min((p["maxItems"] for p in leaves if "maxItems" in p), default=None)
        least = max((p.get("minItems", 0) for p in leaves), default=0)
        if most is not None and most <= 1:
            return parts
        for leaf in leaves:
            if "enum" in leaf:
                arrays = [v for v in leaf["enum"] if not isinstance(v, list) or len({_key(e) for e in v}) == len(v)]
                return [*parts, {"enum": arrays} if arrays else False]
            prefix = leaf.get("prefixItems", [])
            if leaf.get("items") is False and all(self._disjoint(a, b) for a, b in itertools.combinations(prefix, 2)):
                return parts
        values = next((v for p in leaves if "prefixItems" not in p and (v := self._values(p.get("items", True)))), None)
        if values is None:
            raise failed(path, "uniqueItems is kept only for at most six enumerated items")
        most = len(values) if most is None else min(most, len(values))
        sizes = range(least, min(most, 7) + 1)  # of 7 there are 5,040
        if len(values) > ARRANGEMENTS or sum(math.perm(len(values), n) for n in sizes) > ARRANGEMENTS:
            raise failed(path, f"uniqueItems of {len(values)} items has too many arrangements", "grammar_too_large")
        arrays = [list(a) for n in range(least, most + 1) for a in itertools.permutations(values, n)]
        taken = [(a, self._accepts(beside, a)) for a in arrays]
        if any(t is None for _, t in taken):
            raise failed(path, "uniqueItems beside other keywords for items is not kept")
        listed = {"enum": [a for a, t in taken if t]}
        others = self._both([{"type": _named(self._atoms(beside) - {"array"} or ALL)}, *parts])
        return [
            self._either([listed if listed["enum"] else False, *([others] if self._atoms(beside) != {"array"} else [])])
        ]

    def _values(self, schema: Schema) -> list[Any] | None:
        """Return all values of a schema if they are listed, else None."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict):
            return None
        if "oneOf" in schema:
            return None
        if "anyOf" in schema:
            several = [self._values(s) for s in schema["anyOf"]]
            if any(s is None for s in several):
                return None
            return list({_key(v): v for s in several for v in s or ()}.values())
        if "enum" in schema:
            return [v for v in schema["enum"] if self._accepts({k: s for k, s in schema.items() if k != "enum"}, v)]
        if schema.get("type") and set(schema["type"]) <= {"boolean", "null"}:
            return [v for t in schema["type"] for v in ([True, False] if t == "boolean" else [None])]
        return None

    def _unevaluated_properties(self, node: dict[str, Any], path: Path) -> Schema:
        """Close each combination of the node's applicators over the properties that it evaluates."""
        rest = self._convert(node["unevaluatedProperties"], (*path, "unevaluatedProperties"))
        own = {k: v for k, v in node.items() if k != "unevaluatedProperties"}
        closed = []
        for schema, names, patterns, everything in self._evaluated(own, path, 0):
            known = {"properties": dict.fromkeys(names, True), "patternProperties": dict.fromkeys(patterns, True)}
            closing: Schema = True if everything else {**{k: v for k, v in known.items() if v}, OTHERS: rest}
            closed.append(self._both([schema, closing]))
        return self._either(closed)

    def _evaluated(
        self, node: Any, path: Path, depth: int
    ) -> list[tuple[Schema, tuple[str, ...], tuple[str, ...], bool]]:
        """Return alternatives that together are `node`: schema, names and patterns evaluated, whether everything is."""
        if isinstance(node, bool):
            return [(node, (), (), False)] if node else []
        if not isinstance(node, dict):
            raise invalid(path, "a schema is an object or a boolean")
        if depth > RESOLVED:
            raise failed(path, "unevaluatedProperties through recursive references is not supported")
        applicators = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies")
        own = {k: v for k, v in node.items() if k not in applicators}
        everything = OTHERS in own or "unevaluatedProperties" in own
        base = self._convert(own, path)
        found = [(base, tuple(own.get("properties", ())), tuple(own.get("patternProperties", ())), everything)]

        def with_each(others: list[list[Any]]) -> None:
            for several in others:
                self._step(len(found) * len(several))
                if len(found) * len(several) > ALTERNATIVES:
                    raise failed(path, "unevaluatedProperties has too many alternatives", "grammar_too_large")
                found[:] = [
                    (self._both([a[0], b[0]]), (*a[1], *b[1]), (*a[2], *b[2]), a[3] or b[3])
                    for a in found
                    for b in several
                ]

        if "$ref" in node:
            name = self._definition(node["$ref"], (*path, "$ref"))
            where = next(p for p, n in self._names.items() if n == name)
            target = self._root
            for part in where.split("/")[1:]:
                key = part.replace("~1", "/").replace("~0", "~")
                target = target[int(key)] if isinstance(target, list) else target[key]
            with_each([self._evaluated(target, (*path, "$ref"), depth + 1)])
        for i, s in enumerate(node.get("allOf", ())):
            with_each([self._evaluated(s, (*path, "allOf", i), depth + 1)])
        if "anyOf" in node:
            several = [self._evaluated(s, (*path, "anyOf", i), depth + 1) for i, s in enumerate(node["anyOf"])]
            if 2 ** len(several) > ALTERNATIVES:
                raise failed(path, "unevaluatedProperties has too many alternatives", "grammar_too_large")
            before = list(found)
            every: list[Any] = []
            for n in range(1, len(several) + 1):
                for chosen in itertools.combinations(several, n):
                    found[:] = before
                    with_each(list(chosen))
                    every += found
            found[:] = every
        if "oneOf" in node:
            options = [self._convert(s, (*path, "oneOf", i)) for i, s in enumerate(node["oneOf"])]
            alone = self._exactly(options, base, (*path, "oneOf"))
            every = []
            for i, s in enumerate(node["oneOf"]):
                every += [
                    (self._both([alone[i], e[0]]), *e[1:]) for e in self._evaluated(s, (*path, "oneOf", i), depth + 1)
                ]
            with_each([every])
        if "if" in node:
            holds = [
                (self._both([a[0], b[0]]), (*a[1], *b[1]), (*a[2], *b[2]), a[3] or b[3])
                for a in self._evaluated(node["if"], (*path, "if"), depth + 1)
                for b in self._evaluated(node.get("then", True), (*path, "then"), depth + 1)
            ]
            fails = self._either(self._negated(self._convert(node["if"], (*path, "if")), base))
            others = self._evaluated(node.get("else", True), (*path, "else"), depth + 1)
            with_each([[*holds, *((self._both([fails, e[0]]), *e[1:]) for e in others)]])
        for keyword in ("dependentSchemas", "dependencies"):
            for name, needed in node.get(keyword, {}).items():
                absent = {"properties": {name: False}}
                present = {"type": ["object"], "required": [name]}
                schema = {"required": needed} if isinstance(needed, list) else needed
                has = self._evaluated(schema, (*path, keyword, name), depth + 1)
                with_each([[(absent, (), (), False), *((self._both([present, e[0]]), *e[1:]) for e in has)]])
        return found

    # The algebra of converted schemas.

    def _both(self, parts: list[Schema]) -> Schema:
        """Return the conjunction."""
        flat: list[Schema] = []
        for part in parts:
            if part is False:
                return False
            if part is not True:
                for p in part.get("allOf", [part]):
                    if not _among(flat, p):
                        self._joined(flat, p)
        if any(p is False for p in flat):
            return False
        if len(flat) < 24 and any(self._disjoint(a, b, RESOLVED - 3) for a, b in itertools.combinations(flat, 2)):
            return False
        if not flat:
            return True
        return flat[0] if len(flat) == 1 else {"allOf": flat}

    def _joined(self, flat: list[Any], part: dict[str, Any]) -> None:
        """Add a part to a conjunction, within one of its leaves where that is simple."""
        self._step()
        if "enum" in part:
            for i, other in enumerate(flat):
                if isinstance(other, dict) and "enum" in other and len(other) == len(part) == 1:
                    kept = {_key(v) for v in part["enum"]}
                    values = [v for v in other["enum"] if _key(v) in kept]
                    flat[i] = {"enum": values} if values else False
                    return
        elif part.keys() <= {"type", "properties", "required"}:
            for i, other in enumerate(flat):
                if isinstance(other, dict) and not other.keys() & {
                    "$ref",
                    "anyOf",
                    "oneOf",
                    "enum",
                    "patternProperties",
                }:
                    flat[i] = self._merged(other, part)
                    return
        elif part.keys() <= {"type", "notIn"}:
            for i, other in enumerate(flat):
                if isinstance(other, dict) and "notIn" in other and other.keys() <= {"type", "notIn"}:
                    flat[i] = self._merged(other, {"type": part.get("type", list(TYPES))})
                    if isinstance(flat[i], dict):
                        flat[i]["notIn"] = list(dict.fromkeys([*other["notIn"], *part["notIn"]]))
                    return
        flat.append(part)

    def _merged(self, leaf: dict[str, Any], part: dict[str, Any]) -> Schema:
        """Return the conjunction of a leaf and one of type, properties and required, as a leaf."""
        atoms = _atoms_of_leaf(leaf) & _atoms_of_leaf(part)
        properties = dict(leaf.get("properties", {}))
        for name, s in part.get("properties", {}).items():
            properties[name] = self._both([properties.get(name, leaf.get(OTHERS, True)), s])
        required = list(dict.fromkeys((*leaf.get("required", ()), *part.get("required", ()))))
        merged = {**leaf, "properties": properties, "required": required}
        if any(self._dead(merged, name) for name in required):
            atoms -= {"object"}
        if not atoms:
            return False
        empty = [k for k in ("properties", "required") if not merged[k]]
        kept = {k: v for k, v in merged.items() if k not in empty and not atoms.isdisjoint(KEYWORD_TYPES.get(k, ALL))}
        if atoms != ALL:
            kept["type"] = _named(atoms)
        return kept or True

    def _either(self, parts: Iterable[Schema]) -> Schema:
        """Return the disjunction."""
        flat: list[dict[str, Any]] = []
        for part in parts:
            if part is True:
                return True
            if part is not False:
                flat += [p for p in part.get("anyOf", [part]) if not _among(flat, p)]
        self._made += len(flat)
        if self._made > NODES:
            raise failed((), "rewriting it has too many alternatives", "grammar_too_large")
        if not flat:
            return False
        return flat[0] if len(flat) == 1 else {"anyOf": flat}

    def _atoms(self, schema: Schema, depth: int = 0) -> frozenset[str]:
        """Return the atomic types that the schema may accept, perhaps more."""
        self._step()
        if isinstance(schema, bool):
            return ALL if schema else frozenset()
        if "$ref" in schema:
            target = self._resolved(schema)
            return ALL if target is None or depth > RESOLVED else self._atoms(target, depth + 1)
        if "allOf" in schema:
            return frozenset.intersection(*(self._atoms(s, depth + 1) for s in schema["allOf"]))
        if several := _options(schema):
            return frozenset().union(*(self._atoms(s, depth + 1) for s in several))
        return _atoms_of_leaf(schema)

    def _negated(self, schema: Schema, context: Schema, depth: int = 0) -> list[Schema]:
        """Return alternatives that together are all documents of `context`, and perhaps others, outside of `schema`.

        Raises _Unkept if they have no form in the engine's keywords.
        """
        self._step()
        if isinstance(schema, bool):
            return [] if schema else [True]
        if "$ref" in schema:
            target = self._resolved(schema)
            if target is None or depth > RESOLVED:
                raise _Unkept("a recursive reference")
            return self._negated(target, context, depth + 1)
        if "allOf" in schema:
            return [n for s in schema["allOf"] for n in self._negated(s, context, depth + 1)]
        if "oneOf" in schema:
            return self._negated(self._alone(schema), context, depth + 1)
        if "anyOf" in schema:
            found: list[Schema] = [True]
            for s in schema["anyOf"]:
                if self._disjoint(context, s):
                    continue
                without = self._negated(s, context, depth + 1)
                found = [b for f in found for n in without if (b := self._both([f, n])) is not False]
                if len(found) > ALTERNATIVES:
                    raise _Unkept("so many alternatives")
            return found
        return self._negated_leaf(schema, context, depth)

    def _negated_leaf(self, leaf: dict[str, Any], context: Schema, depth: int) -> list[Schema]:
        possible = self._atoms(context)
        found: list[Schema] = []
        if "type" in leaf and (others := possible - _atoms_of_leaf({"type": leaf["type"]})):
            found.append({"type": _named(others)})
        if "enum" in leaf:
            found += self._negated_values(leaf["enum"], context)
        for keyword, value in leaf.items():
            kinds = KEYWORD_TYPES.get(keyword)
            if kinds is None or possible.isdisjoint(kinds) or _atoms_of_leaf(leaf).isdisjoint(kinds):
                continue
            match keyword:
                case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                    opposite = {
                        "minimum": "exclusiveMaximum",
                        "maximum": "exclusiveMinimum",
                        "exclusiveMinimum": "maximum",
                        "exclusiveMaximum": "minimum",
                    }[keyword]
                    found.append({"type": ["number"], opposite: value})
                case "minLength" | "minItems" | "minProperties":
                    found.append({"type": list(kinds), keyword.replace("min", "max"): value - 1})
                case "maxLength" | "maxItems" | "maxProperties":
                    found.append({"type": list(kinds), keyword.replace("max", "min"): value + 1})
                case "format":
                    pass  # an annotation: it excludes nothing
                case "notIn":
                    found.append({"enum": value})
                case "required":
                    absent = [name for name in value if name not in leaf.get("properties", {})]
                    found += [{"type": ["object"], "properties": {name: False}} for name in absent]
                case "properties":
                    for name, s in value.items():
                        inner = self._property(context, name)
                        without = [] if inner is False else self._negated(s, inner, depth + 1)
                        one = self._either(without)
                        if name in leaf.get("required", ()):  # absent, or of another value
                            found.append({"type": ["object"], "properties": {name: one}})
                        elif one is not False:
                            found.append({"type": ["object"], "required": [name], "properties": {name: one}})
                case "prefixItems":
                    for i, s in enumerate(value):
                        without = self._either(self._negated(s, True, depth + 1))
                        prefix = [*[True] * i, without]
                        if without is not False:
                            found.append({"type": ["array"], "prefixItems": prefix, "minItems": i + 1})
                case "items" if value is False:
                    found.append({"type": ["array"], "minItems": len(leaf.get("prefixItems", ())) + 1})
                case "additionalProperties" if "patternProperties" not in leaf:
                    keys = self._keys(context)
                    if keys is None:
                        raise _Unkept("additionalProperties")
                    for name in [k for k in keys if k not in leaf.get("properties", {})]:
                        inner = self._property(context, name)
                        without = [] if inner is False else self._negated(value, inner, depth + 1)
                        if (one := self._either(without)) is not False:
                            found.append({"type": ["object"], "required": [name], "properties": {name: one}})
                case _:
                    raise _Unkept(keyword)
        found = [f for f in found if not self._disjoint(context, f)]
        other = next((f for f in found if f.keys() == {"type"}), None)
        named = next((f for f in found if f.keys() == {"type", "properties"}), None)
        if other and named and possible - _atoms_of_leaf(other) == {"object"}:
            # `properties` says nothing of other types, so one alternative covers both.
            found = [{"properties": f["properties"]} if f is named else f for f in found if f is not other]
        return found

    def _negated_values(self, values: list[Any], context: Schema) -> list[Schema]:
        possible = self._atoms(context)
        listed = self._values(context)
        if listed is not None:
            kept = {_key(v) for v in values}
            return [{"enum": rest}] if (rest := [v for v in listed if _key(v) not in kept]) else []
        kinds = frozenset(_type_of(v) for v in values)
        numbers = sorted({v for v in values if _type_of(v) in NUMBER})
        kinds |= NUMBER if numbers else frozenset()
        found: list[Schema] = [{"type": _named(possible - kinds)}] if possible - kinds else []
        if "boolean" in kinds & possible and (rest := [b for b in (True, False) if b not in _booleans(values)]):
            found.append({"enum": rest})
        if numbers and possible & NUMBER:
            bounds = [-math.inf, *numbers, math.inf]
            for low, high in itertools.pairwise(bounds):
                between: dict[str, Any] = {"type": ["number"]}
                between |= {"exclusiveMinimum": low} if low > -math.inf else {}
                between |= {"exclusiveMaximum": high} if high < math.inf else {}
                found.append(between)
        if "string" in kinds & possible:
            found.append({"type": ["string"], "notIn": [v for v in values if isinstance(v, str)]})
        if kinds & possible & {"array", "object"}:
            raise _Unkept("a constant array or object")
        return found

    def _property(self, context: Schema, name: str, depth: int = 0) -> Schema:
        """Return a schema of the values that `context` may have under a name; perhaps of more."""
        context = self._resolved(context)
        if not isinstance(context, dict) or depth > RESOLVED:
            return context is not False
        if "allOf" in context:
            return self._both([self._property(s, name, depth + 1) for s in context["allOf"]])
        if several := _options(context):
            return self._either([self._property(s, name, depth + 1) for s in several])
        if name in context.get("properties", {}):
            return context["properties"][name]
        if "enum" in context:
            values = [v[name] for v in context["enum"] if isinstance(v, dict) and name in v]
            return {"enum": values} if values else False
        return True if "patternProperties" in context else context.get(OTHERS, True)

    def _keys(self, schema: Schema, depth: int = 0) -> list[str] | None:
        """Return all keys that the schema's objects may have, None if they are not listed."""
        schema = self._resolved(schema)
        if not isinstance(schema, dict) or depth > RESOLVED:
            return None
        if "allOf" in schema:
            return next((k for s in schema["allOf"] if (k := self._keys(s, depth + 1)) is not None), None)
        if options := _options(schema):
            several = [self._keys(s, depth + 1) for s in options if "object" in self._atoms(s)]
            return None if None in several else list(dict.fromkeys(k for s in several for k in s or ()))
        if "enum" in schema:
            return list(dict.fromkeys(k for v in schema["enum"] if isinstance(v, dict) for k in v))
        if schema.get(OTHERS) is False and "patternProperties" not in schema:
            return list(schema.get("properties", ()))
        return None

    def _disjoint(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        """Return whether no document satisfies both; False if that is not seen."""
        a, b = self._resolved(a), self._resolved(b)
        if a is False or b is False:
            return True
        if a is None or b is None or a is True or b is True or depth > RESOLVED:
            return False
        if self._atoms(a).isdisjoint(self._atoms(b)):
            return True
        for x, y in ((a, b), (b, a)):
            if several := _options(x):
                return all(self._disjoint(s, y, depth + 1) for s in several)
        for x, y in ((a, b), (b, a)):
            if "allOf" in x:
                return any(self._disjoint(s, y, depth + 1) for s in x["allOf"])
        for x, y in ((a, b), (b, a)):
            if "enum" in x:
                return all(self._accepts(y, v) is False for v in x["enum"])
        both = _atoms_of_leaf(a) & _atoms_of_leaf(b)
        return all(self._disjoint_in(kind, a, b, depth) for kind in both)

    def _disjoint_in(self, kind: str, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        if kind in NUMBER:
            low = max((x[k] for x in (a, b) for k in ("minimum", "exclusiveMinimum") if k in x), default=-math.inf)
            high = min((x[k] for x in (a, b) for k in ("maximum", "exclusiveMaximum") if k in x), default=math.inf)
            open_ = any(x.get("exclusiveMinimum") == low or x.get("exclusiveMaximum") == high for x in (a, b))
            return low > high or (low == high and open_)
        unit = {"string": "Length", "array": "Items", "object": "Properties"}.get(kind)
        if unit is None:
            return False
        least = max(x.get("min" + unit, 0) for x in (a, b))
        if least > min(x.get("max" + unit, math.inf) for x in (a, b)):
            return True
        if kind == "array":
            return any(self._disjoint(_item(a, i), _item(b, i), depth + 1) for i in range(min(least, 16)))
        if kind == "object":
            for name in dict.fromkeys((*a.get("required", ()), *b.get("required", ()))):
                if self._disjoint(self._property(a, name), self._property(b, name), depth + 1):
                    return True
        return False

    def _accepts(self, schema: Schema, value: Any, depth: int = 0) -> bool | None:
        """Return whether a schema accepts a value, None if that is not known."""
        schema = self._resolved(schema)
        if isinstance(schema, bool):
            return schema
        if schema is None or depth > 4 * RESOLVED:
            return None
        if "allOf" in schema:
            return _all(self._accepts(s, value, depth + 1) for s in schema["allOf"])
        if "oneOf" in schema:
            each = [self._accepts(s, value, depth + 1) for s in schema["oneOf"]]
            return each.count(True) == 1 if None not in each else None
        if "anyOf" in schema:
            some = [self._accepts(s, value, depth + 1) for s in schema["anyOf"]]
            return True if True in some else None if None in some else False
        kind = _type_of(value)
        if kind not in _atoms_of_leaf({k: v for k, v in schema.items() if k == "type"}):
            return False
        if "enum" in schema and _key(value) not in {_key(v) for v in schema["enum"]}:
            return False
        known = True
        match kind:
            case "integer" | "fraction":
                known = "multipleOf" not in schema
                if not (
                    schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
                    and schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
                ):
                    return False
            case "string":
                known = "pattern" not in schema and "format" not in schema
                if value.startswith(tuple(schema.get("notPrefix", ()))):
                    return False
                if value in schema.get("notIn", ()):
                    return False
                if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
                    return False
            case "array":
                if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
                    return False
                return _all(self._accepts(_item(schema, i), v, depth + 1) for i, v in enumerate(value))
            case "object":
                if not schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", math.inf):
                    return False
                if any(name not in value for name in schema.get("required", ())):
                    return False
                if "patternProperties" in schema:
                    return None
                return _all(self._accepts(self._property(schema, k), v, depth + 1) for k, v in value.items())
        return True if known else None

    # What only the engine asks for.

    def _harden(self, schema: Schema, path: Path, *, sealed: bool = False) -> Schema:
        """Spell out the keys of open objects, as the module's docstring says, and what counts properties."""
        if isinstance(schema, bool) or "$ref" in schema:
            return schema
        if "oneOf" in schema:
            return self._harden(self._alone(schema), path, sealed=sealed)
        if "anyOf" in schema:
            return self._either([self._harden(s, path, sealed=sealed) for s in schema["anyOf"]])
        if "allOf" in schema:
            parts = schema["allOf"]
            special = [_special(self._resolved(s)) for s in parts]
            if any(special):  # it alone says which further keys there are
                parts = [s if own else self._resolved(s) for s, own in zip(parts, special, strict=True)]
                parts = [s if r is None else r for s, r in zip(schema["allOf"], parts, strict=True)]
            return self._both(
                [
                    self._harden(s, path, sealed=sealed or (any(special) and not own))
                    for s, own in zip(parts, special, strict=True)
                ]
            )
        leaf = dict(schema)
        if leaf.keys() & {"notIn", "notPrefix"}:
            pattern = {"pattern": other_than(leaf.pop("notIn", ()), leaf.pop("notPrefix", ()))}
            return (
                self._both([self._harden(leaf, path, sealed=sealed), pattern])
                if "pattern" in leaf
                else {**leaf, **pattern}
            )
        if leaf.get("format") in ("date", "date-time") and leaf.get("pattern") != _LEAP_DAYS:
            leap = {"pattern": _LEAP_DAYS}
            return self._both([leaf, leap | {"format": leaf["format"]}]) if "pattern" in leaf else {**leaf, **leap}
        for keyword in ("properties", "patternProperties"):
            if keyword in leaf:
                leaf[keyword] = {k: self._harden(s, path) for k, s in leaf[keyword].items()}
        for keyword in ("items", OTHERS):
            if keyword in leaf:
                leaf[keyword] = self._harden(leaf[keyword], path)
        if "prefixItems" in leaf:
            leaf["prefixItems"] = [self._harden(s, path) for s in leaf["prefixItems"]]
        if "object" not in _atoms_of_leaf(leaf):
            return leaf
        return self._counted(self._sealed(leaf, sealed=sealed))

    def _sealed(self, leaf: dict[str, Any], *, sealed: bool) -> dict[str, Any]:
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
            if rest is None or (others is not True and rest and any(re.search(rest, n) for n in names)):
                raise failed(
                    (), f"patternProperties {shorten(str(list(patterns)))} beside other properties is not kept"
                )
            leaf |= {"patternProperties": {**patterns, rest: others} if rest else patterns, OTHERS: False}
        return leaf

    def _counted(self, leaf: dict[str, Any]) -> Schema:
        """Choose the properties that minProperties and maxProperties leave open."""
        least, most = leaf.get("minProperties", 0), leaf.get("maxProperties")
        required = leaf.get("required", [])
        optional = [n for n, s in leaf.get("properties", {}).items() if s is not False and n not in required]
        if least <= len(required):
            leaf.pop("minProperties", None)
            least = 0
        keys = self._keys(leaf)
        if keys is not None and most is not None and most >= len(keys):
            leaf.pop("maxProperties", None)
            most = None
        if not least and most is None:
            return leaf
        if keys is None and least > len(required) + 1:
            # An object may repeat a key that only a pattern names, and then has fewer than the engine counts.
            raise failed((), "minProperties of properties that are not listed is kept only for one more than required")
        if keys is None and not optional:
            return leaf
        bare = {k: v for k, v in leaf.items() if k not in ("minProperties", "maxProperties")}
        wanted = max(0, least - len(required))
        limit = len(optional) if most is None else min(len(optional), most - len(required))
        if limit < 0 or (wanted > len(optional) and keys is not None):
            return self._without_objects(leaf)
        sizes = [wanted] if most is None else range(wanted, limit + 1)
        chosen = [c for n in sizes for c in itertools.islice(itertools.combinations(optional, n), ALTERNATIVES + 1)]
        if len(chosen) > ALTERNATIVES:
            raise failed((), "minProperties or maxProperties leave too many choices", "grammar_too_large")
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
            none = {**bare["properties"], **dict.fromkeys(optional, False)}
            options.append({**leaf, "properties": none})
        return self._either(options)

    @staticmethod
    def _without_objects(leaf: dict[str, Any]) -> Schema:
        try:
            names = _named(_atoms_of_leaf(leaf) - {"object"})
        except _Unkept:
            names = []
        return (
            {**{k: v for k, v in leaf.items() if "object" not in KEYWORD_TYPES.get(k, ())}, "type": names}
            if names
            else False
        )


def _draft_of(root: dict[str, Any]) -> int:
    named = root.get("$schema", "")
    return next((number for name, number in DRAFTS.items() if isinstance(named, str) and f"/{name}/" in named), 2020)


def _special(schema: Schema) -> bool:
    """Return whether a leaf constrains keys that it does not name."""
    return isinstance(schema, dict) and (schema.get(OTHERS, True) is not True or "patternProperties" in schema)


def _booleans(values: list[Any]) -> list[bool]:
    return [v for v in values if isinstance(v, bool)]


def _dict(schema: Schema) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {}


def _parts(schema: Schema) -> list[dict[str, Any]]:
    leaf = _dict(schema)
    parts: list[dict[str, Any]] = leaf.get("allOf", [leaf] if leaf else [])
    return parts


def _options(schema: dict[str, Any]) -> list[Schema]:
    return schema.get("anyOf") or schema.get("oneOf") or []


def _item(leaf: dict[str, Any], index: int) -> Schema:
    prefix = leaf.get("prefixItems", ())
    return prefix[index] if index < len(prefix) else leaf.get("items", True)


def _all(several: Iterator[bool | None]) -> bool | None:
    found = list(several)
    return False if False in found else None if None in found else True


def _atoms_of_leaf(leaf: dict[str, Any]) -> frozenset[str]:
    atoms: frozenset[str] = ALL
    if "type" in leaf:
        names = leaf["type"] if isinstance(leaf["type"], list) else [leaf["type"]]
        atoms = frozenset().union(*(TYPES[n] for n in names))
    if "enum" in leaf:
        atoms &= {_type_of(v) for v in leaf["enum"]}
    return atoms


def _children(leaf: dict[str, Any]) -> Iterator[Schema]:
    for keyword, value in leaf.items():
        if keyword in ("anyOf", "allOf", "prefixItems"):
            yield from value
        elif keyword in ("properties", "patternProperties"):
            yield from value.values()
        elif keyword in ("items", OTHERS):
            yield value


def _refs(schema: Schema) -> Iterator[str]:
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for child in _children(schema):
            yield from _refs(child)


def _whole(value: Any, keyword: str, path: Path) -> int:
    """Return the value of a keyword that counts. Raises GrammarFailed."""
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < 0:
        raise invalid((*path, keyword), f"{keyword} is a whole number, at least 0")
    return int(value)


def _endless(definitions: dict[str, Schema]) -> str | None:
    """Return the name of a definition whose documents would all contain, or be, themselves; None without one."""
    users: dict[str, list[str]] = {name: [] for name in definitions}
    for name, schema in definitions.items():
        for used in set(_refs(schema)):
            users[used].append(name)
    # What admits no document even if every reference did is merely `false`, which the engine knows.
    ended = {name for name, schema in definitions.items() if not _ends(schema, definitions)}
    todo = list(definitions)
    while todo:
        name = todo.pop()
        if name not in ended and _ends(definitions[name], ended):
            ended.add(name)
            todo += users[name]
    return min(definitions.keys() - ended, default=None)


def _ends(schema: Schema, ended: Container[str]) -> bool:
    """Return whether some document satisfies a schema, if references outside `ended` had none. May err on yes."""
    if not isinstance(schema, dict):
        return bool(schema)
    if "$ref" in schema:
        return schema["$ref"] in ended
    if "anyOf" in schema:
        return any(_ends(each, ended) for each in schema["anyOf"])
    if "allOf" in schema:
        return all(_ends(each, ended) for each in schema["allOf"])
    if "enum" in schema:
        return True
    atoms = _atoms_of_leaf(schema)
    if atoms - {"object", "array"}:
        return True
    named = schema.get("properties", {})
    least = schema.get("minItems", 0)
    return ("object" in atoms and all(_ends(named.get(name, True), ended) for name in schema.get("required", ()))) or (
        "array" in atoms and all(_ends(_item(schema, index), ended) for index in range(min(least, 100)))
    )


def _count(schema: Schema) -> int:
    if not isinstance(schema, dict):
        return 1
    return 1 + len(schema.get("enum", ())) + sum(_count(c) for c in _children(schema))


def _linked(schema: Schema) -> Schema:
    """Return the schema with pointers for names of definitions."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "$ref":
            out[keyword] = f"#/$defs/{value}"
        elif keyword in ("anyOf", "allOf", "prefixItems"):
            out[keyword] = [_linked(s) for s in value]
        elif keyword in ("properties", "patternProperties"):
            out[keyword] = {k: _linked(s) for k, s in value.items()}
        elif keyword in ("items", OTHERS):
            out[keyword] = _linked(value)
        else:
            out[keyword] = value
    return out


def _find(node: Any, keyword: str, path: Path = ()) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield objects of a client's schema that have a keyword whose value is a string, with their paths."""
    if isinstance(node, dict):
        if isinstance(node.get(keyword), str):
            yield node, path
        for k, v in node.items():
            if k not in ("enum", "const", "default", "examples"):
                yield from _find(v, keyword, (*path, k))
    elif isinstance(node, list):
        for i, v in enumerate(node):
            yield from _find(v, keyword, (*path, i))
