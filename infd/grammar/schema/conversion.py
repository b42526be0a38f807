"""Convert a client's schema keyword by keyword.

A schema's type, values, bounds, items and properties become a leaf. `oneOf`, `not`, `if`, the dependencies and other
applicators become further schemas in a conjunction with the leaf.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from infd.errors import shorten
from infd.grammar.schema.algebra import Algebra
from infd.grammar.schema.arrays import Arrays
from infd.grammar.schema.evaluation import Evaluation
from infd.grammar.schema.negation import Negation
from infd.grammar.schema.patterns import kept_pattern, without_prefixes
from infd.grammar.schema.references import Definitions, References, nodes_with
from infd.grammar.schema.refusals import Path, failed, invalid
from infd.grammar.schema.shapes import (
    OTHERS,
    TYPES,
    Inexpressible,
    Schema,
    atoms_of_leaf,
    is_dead,
    key,
    keywords_of,
    names_of,
    type_of,
)

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
_SINCE = {  # keyword -> first draft that defines it; earlier drafts ignore it
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(
        ("dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "minContains"), 2019
    ),
    **dict.fromkeys(("maxContains", "$anchor", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef", "$dynamicAnchor"), 2020),
}
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "contains", "not", "dependentSchemas")


class Conversion:
    """Converts the client's schema `root` and the schemas inside it."""

    def __init__(self, root: Any) -> None:
        self.references = References(root)
        self.definitions = Definitions(self.references)
        self.algebra = Algebra(self.definitions)
        self.negation = Negation(self.algebra)
        self._arrays = Arrays(self.negation)
        self._evaluation = Evaluation(self.convert, self.definitions, self.negation)
        self._draft = self.references.draft

    def convert(self, node: Any, path: Path) -> Schema:
        """Return the converted schema of a node of the client's schema. Raises GrammarFailed."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise invalid(path, "a schema is an object or a boolean")
        node = {k: v for k, v in node.items() if _SINCE.get(k, 0) <= self._draft}
        self._check_references(node, path)
        if "$ref" in node and self._draft <= 7:
            node = {"$ref": node["$ref"]}
        leaf = self._leaf(node, path)
        parts = [leaf]
        if "$ref" in node:
            parts.append({"$ref": self.definitions.name(node["$ref"], (*path, "$ref"), self.convert)})
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
                    parts += convert(node, (*path, keyword), self.algebra.conjunction(parts))
                except Inexpressible as set_:
                    raise failed((*path, keyword), f"{keyword} would need the opposite of {set_}") from None
        if node.get("uniqueItems") is True:
            parts = self._arrays.unique(parts, (*path, "uniqueItems"))
        if "unevaluatedProperties" in node and OTHERS not in node:
            try:
                parts = [self._evaluation.closed(node, path)]
            except Inexpressible as set_:
                raise failed((*path, "unevaluatedProperties"), f"it would need the opposite of {set_}") from None
        everything = "additionalItems" if isinstance(node.get("items"), list) else "items"
        if "unevaluatedItems" in node and node["unevaluatedItems"] is not True and everything not in node:
            if any(k in node for k in _APPLICATORS):
                raise failed((*path, "unevaluatedItems"), "unevaluatedItems beside other applicators is not supported")
            rest = self.convert(node["unevaluatedItems"], (*path, "unevaluatedItems"))
            prefix = {"prefixItems": leaf["prefixItems"]} if "prefixItems" in keywords_of(leaf) else {}
            parts.append({"items": rest, **prefix})
        return self.algebra.conjunction(self.algebra.expanded(parts))

    def _check_references(self, node: dict[str, Any], path: Path) -> None:
        identified = self.references.id_keyword
        embedded = path and isinstance(node.get(identified), str) and not node[identified].startswith("#")
        if embedded and next(nodes_with(node, "$ref"), None) is not None:
            # A $ref inside this schema is relative to the schema's $id, but `References` knows only the root's $id.
            raise failed((*path, identified), f"references inside a schema with {identified} are not followed")
        for keyword in ("$dynamicRef", "$recursiveRef"):
            if keyword in node:
                raise failed((*path, keyword), f"{keyword} is not supported")

    # The keywords of a leaf.

    def _leaf(self, node: dict[str, Any], path: Path) -> Schema:
        leaf: dict[str, Any] = {}
        if "type" in node:
            names = node["type"] if isinstance(node["type"], list) else [node["type"]]
            if not names or not all(isinstance(n, str) and n in TYPES for n in names):
                raise invalid((*path, "type"), f"{shorten(str(node['type']))} is no type")
            leaf["type"] = names_of(frozenset().union(*(TYPES[n] for n in names)))
        if "enum" in node:
            if not isinstance(node["enum"], list):
                raise invalid((*path, "enum"), "enum is an array")
            leaf["enum"] = list({key(v): v for v in node["enum"]}.values())
        if "const" in node:
            values = {key(v) for v in leaf.get("enum", [node["const"]])}
            leaf["enum"] = [node["const"]] if key(node["const"]) in values else []
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if keyword in node:
                self._number(node[keyword], leaf, keyword, path)
        for keyword in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"):
            if keyword in node:
                count = _count(node[keyword], keyword, path)
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
        return self._enumerated(leaf) if "enum" in leaf else leaf or True

    def _enumerated(self, leaf: dict[str, Any]) -> Schema:
        """Return a leaf without the values of `enum` that its other keywords reject; False if no value is left."""
        rest = {k: v for k, v in leaf.items() if k != "enum"}
        atoms = atoms_of_leaf(rest)
        values = [v for v in leaf["enum"] if type_of(v) in atoms]
        values = [v for v in values if self.algebra.accepts(rest, v) is not False]
        if not values:
            return False
        if all(self.algebra.accepts(rest, v) for v in values):
            return {"enum": values}
        return {**leaf, "enum": values}

    def _number(self, value: Any, leaf: dict[str, Any], keyword: str, path: Path) -> None:
        if isinstance(value, bool) and self._draft == 4 and keyword.startswith("exclusive"):
            bound = "minimum" if keyword == "exclusiveMinimum" else "maximum"
            if value and bound in leaf:
                leaf[keyword] = leaf.pop(bound)
            return
        if self._draft == 4 and keyword.startswith("exclusive"):
            raise invalid((*path, keyword), f"{keyword} is a boolean in draft 4; write {keyword.lower()[9:]} beside it")
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
            leaf["prefixItems"] = [self.convert(s, (*path, first, i)) for i, s in enumerate(prefix)]
        if (converted := self.convert(items, (*path, rest))) is not True:
            leaf["items"] = converted

    def _properties(self, node: dict[str, Any], leaf: dict[str, Any], path: Path) -> None:
        for keyword in ("properties", "patternProperties"):
            named = node.get(keyword, {})
            if not isinstance(named, dict):
                raise invalid((*path, keyword), f"{keyword} is an object")
            if named:
                leaf[keyword] = {k: self.convert(s, (*path, keyword, k)) for k, s in named.items()}
        if "patternProperties" in leaf:
            at = (*path, "patternProperties")
            leaf["patternProperties"] = {kept_pattern(p, (*at, p)): s for p, s in leaf["patternProperties"].items()}
        if (others := self.convert(node.get(OTHERS, True), (*path, OTHERS))) is not True:
            leaf[OTHERS] = others
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(r, str) for r in required):
            raise invalid((*path, "required"), "required is an array of strings")
        if required:
            leaf["required"] = list(dict.fromkeys(required))
        if any(is_dead(leaf, r) for r in leaf.get("required", ())):
            leaf.clear()
            leaf["type"] = names_of(atoms_of_leaf({"type": node.get("type", list(TYPES))}) - {"object"})

    # Applicators. Each method returns the members that its keyword adds to the conjunction so far, `beside`.

    def _each(self, node: dict[str, Any], path: Path) -> list[Schema]:
        several = node[str(path[-1])]
        if not isinstance(several, list) or not several:
            raise invalid(path, f"{path[-1]} is an array of schemas")
        return [self.convert(s, (*path, i)) for i, s in enumerate(several)]

    def _all_of(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        return self._each(node, path)

    def _any_of(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        return [self.algebra.disjunction(self._each(node, path))]

    def _one_of(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        """Return a converted oneOf. `Negation.exclusive` makes its options disjoint once all definitions are known."""
        options = self._each(node, path)
        return [{"oneOf": options, "beside": beside, "at": path}] if len(options) > 1 else options

    def _not(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        return [self.algebra.disjunction(self.negation.of(self.convert(node["not"], path), beside))]

    def _if(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        then, other = (self.convert(node.get(k, True), (*path[:-1], k)) for k in ("then", "else"))
        if then is True and other is True:
            return []
        condition = self.convert(node["if"], path)
        # If `other` is True, `then` could replace `holds`, but `Algebra.expanded` requires alternatives that exclude
        # each other.
        holds = self.algebra.conjunction([condition, then])
        without = self.negation.of(condition, self.algebra.conjunction([beside, other]))
        fails = self.algebra.conjunction([self.algebra.disjunction(without), other])
        return [self.algebra.disjunction([holds, fails])]

    def _dependencies(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        dependencies = node[str(path[-1])]
        if not isinstance(dependencies, dict):
            raise invalid(path, f"{path[-1]} is an object")
        parts = []
        for name, needed in dependencies.items():
            required = [needed] if isinstance(needed, str) else needed
            then = self.convert({"required": required} if isinstance(required, list) else needed, (*path, name))
            if then is True or self.algebra.atoms(beside).isdisjoint({"object"}):
                continue
            if name in keywords_of(beside).get("required", ()) and self.algebra.atoms(beside) == {"object"}:
                parts.append(then)
                continue
            absent = {"properties": {name: False}}
            if len(dependencies) > 1 and keywords_of(then).keys() == {"properties"} and len(then["properties"]) == 1:
                # Alternatives by the value of the property that `then` restricts, so that the alternatives of several
                # dependencies exclude each other, as `Algebra.expanded` requires.
                with suppress(Inexpressible):
                    without = self.algebra.disjunction(self.negation.of(then, True))
                    parts.append(self.algebra.disjunction([then, self.algebra.conjunction([without, absent])]))
                    continue
            present = {"type": ["object"], "required": [name]}
            parts.append(self.algebra.disjunction([absent, self.algebra.conjunction([present, then])]))
        return parts

    def _property_names(self, node: dict[str, Any], path: Path, beside: Schema) -> list[Schema]:
        names = self.algebra.resolved(self.convert(node["propertyNames"], path))
        if names is None:
            raise failed(path, "propertyNames that refers to itself is not supported")
        if names is True:
            return []
        if names is False or "string" not in self.algebra.atoms(names):
            return [{OTHERS: False, "properties": dict.fromkeys(keywords_of(beside).get("properties", {}), False)}]
        kept = set(keywords_of(names)) - {"type"}
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
        least = _count(node.get("minContains", 1), "minContains", path[:-1])
        most = None if "maxContains" not in node else _count(node["maxContains"], "maxContains", path[:-1])
        wanted = self.convert(node["contains"], path)
        return self._arrays.containing(wanted, (least, most), beside, path)


def _count(value: Any, keyword: str, path: Path) -> int:
    """Return a keyword's value if it is a whole number of at least 0. Raises GrammarFailed."""
    whole = value.is_integer() if isinstance(value, float) else isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < 0:
        raise invalid((*path, keyword), f"{keyword} is a whole number, at least 0")
    return int(value)
