"""Negate converted schemas: a negation is pushed inwards until it is a type, a bound, a value or an absent property."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from infd.grammar.schema.algebra import ALTERNATIVES, RESOLVED
from infd.grammar.schema.refusals import failed
from infd.grammar.schema.shapes import KEYWORD_TYPES, NUMBER, Inexpressible, atoms_of_leaf, key, names_of, type_of

if TYPE_CHECKING:
    from infd.grammar.schema.algebra import Algebra
    from infd.grammar.schema.refusals import Path
    from infd.grammar.schema.shapes import Schema

_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


class Negation:
    """Negates schemas of an algebra.

    A negation is a list of alternatives. Of the documents that a schema `context` accepts, the alternatives together
    accept exactly those that the negated schema rejects. Other documents they may accept or reject.
    """

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra

    def of(self, schema: Schema, context: Schema, depth: int = 0) -> list[Schema]:
        """Return the negation of a schema. Raises Inexpressible if the engine's keywords cannot express it."""
        self.algebra.step()
        if isinstance(schema, bool):
            return [] if schema else [True]
        if "$ref" in schema:
            target = self.algebra.resolved(schema)
            if target is None or depth > RESOLVED:
                raise Inexpressible("a recursive reference")
            return self.of(target, context, depth + 1)
        if "allOf" in schema:
            return [n for s in schema["allOf"] for n in self.of(s, context, depth + 1)]
        if "oneOf" in schema:
            return self.of(self.exclusive(schema), context, depth + 1)
        if "anyOf" in schema:
            found: list[Schema] = [True]
            for s in schema["anyOf"]:
                if self.algebra.disjoint(context, s):
                    continue
                without = self.of(s, context, depth + 1)
                found = [b for f in found for n in without if (b := self.algebra.conjunction([f, n])) is not False]
                if len(found) > ALTERNATIVES:
                    raise Inexpressible("so many alternatives")
            return found
        return self._of_leaf(schema, context, depth)

    def exclusive(self, schema: dict[str, Any]) -> Schema:
        """Return a oneOf as an anyOf of disjoint alternatives."""
        return self.algebra.disjunction(self.exclusive_options(schema["oneOf"], schema["beside"], schema["at"]))

    def exclusive_options(self, options: list[Schema], beside: Schema, path: Path) -> list[Schema]:
        """Return the options of a oneOf, each without the documents in `beside` that another option accepts.

        Raises GrammarFailed at `path`.
        """
        alone, original = [], options
        options = list(options)
        for i, option in enumerate(original):
            whole = self.algebra.conjunction([beside, option])
            for j, other in enumerate(original):
                if i != j and option is not False and not self.algebra.disjoint(whole, other):
                    try:
                        without = self.of(other, whole)
                    except Inexpressible as set_:
                        message = f"alternatives {i} and {j} overlap, and the opposite of {set_} cannot be kept"
                        raise failed(path, message) from None
                    options[i] = self.algebra.conjunction([options[i], self.algebra.disjunction(without)])
                    whole = self.algebra.conjunction([beside, options[i]])
            alone.append(options[i])
        return alone

    def _of_leaf(self, leaf: dict[str, Any], context: Schema, depth: int) -> list[Schema]:
        possible = self.algebra.atoms(context)
        found: list[Schema] = []
        if "type" in leaf and (others := possible - atoms_of_leaf({"type": leaf["type"]})):
            found.append({"type": names_of(others)})
        if "enum" in leaf:
            found += self._of_values(leaf["enum"], context)
        for keyword in leaf:
            kinds = KEYWORD_TYPES.get(keyword)
            if kinds is None or possible.isdisjoint(kinds) or atoms_of_leaf(leaf).isdisjoint(kinds):
                continue
            found += self._of_keyword(keyword, leaf, context, depth)
        found = [f for f in found if not self.algebra.disjoint(context, f)]
        other = next((f for f in found if f.keys() == {"type"}), None)
        named = next((f for f in found if f.keys() == {"type", "properties"}), None)
        if other and named and possible - atoms_of_leaf(other) == {"object"}:
            # `properties` does not constrain types other than objects, so `named` without its type replaces both.
            found = [{"properties": f["properties"]} if f is named else f for f in found if f is not other]
        return found

    def _of_keyword(self, keyword: str, leaf: dict[str, Any], context: Schema, depth: int) -> list[Schema]:
        """Return alternatives that accept the documents that violate one keyword of a leaf."""
        value = leaf[keyword]
        kinds = list(KEYWORD_TYPES[keyword])
        match keyword:
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                return [{"type": ["number"], _OPPOSITES[keyword]: value}]
            case "minLength" | "minItems" | "minProperties":
                return [{"type": kinds, keyword.replace("min", "max"): value - 1}]
            case "maxLength" | "maxItems" | "maxProperties":
                return [{"type": kinds, keyword.replace("max", "min"): value + 1}]
            case "format":
                return []  # an annotation, which excludes no document
            case "notIn":
                return [{"enum": value}]
            case "required":
                absent = [name for name in value if name not in leaf.get("properties", {})]
                return [{"type": ["object"], "properties": {name: False}} for name in absent]
            case "properties":
                return self._of_properties(leaf, context, depth)
            case "prefixItems":
                found: list[Schema] = []
                for i, s in enumerate(value):
                    without = self.algebra.disjunction(self.of(s, True, depth + 1))
                    prefix = [*[True] * i, without]
                    if without is not False:
                        found.append({"type": ["array"], "prefixItems": prefix, "minItems": i + 1})
                return found
            case "items" if value is False:
                return [{"type": ["array"], "minItems": len(leaf.get("prefixItems", ())) + 1}]
            case "additionalProperties" if "patternProperties" not in leaf:
                keys = self.algebra.keys(context)
                if keys is None:
                    raise Inexpressible("additionalProperties")
                others = {name: value for name in keys if name not in leaf.get("properties", {})}
                return self._of_properties({"properties": others}, context, depth)
        raise Inexpressible(keyword)

    def _of_properties(self, leaf: dict[str, Any], context: Schema, depth: int) -> list[Schema]:
        """Return alternatives for each property of the leaf: objects in which the property violates the leaf."""
        found: list[Schema] = []
        for name, s in leaf["properties"].items():
            inner = self.algebra.property(context, name)
            without = self.algebra.disjunction([] if inner is False else self.of(s, inner, depth + 1))
            if name in leaf.get("required", ()):  # the property is absent or has a wrong value
                found.append({"type": ["object"], "properties": {name: without}})
            elif without is not False:
                found.append({"type": ["object"], "required": [name], "properties": {name: without}})
        return found

    def _of_values(self, values: list[Any], context: Schema) -> list[Schema]:
        """Return alternatives that accept the documents of `context` that are no value of an enum."""
        possible = self.algebra.atoms(context)
        listed = self.algebra.values(context)
        if listed is not None:
            kept = {key(v) for v in values}
            return [{"enum": rest}] if (rest := [v for v in listed if key(v) not in kept]) else []
        kinds = frozenset(type_of(v) for v in values)
        numbers = sorted({v for v in values if type_of(v) in NUMBER})
        kinds |= NUMBER if numbers else frozenset()
        found: list[Schema] = [{"type": names_of(possible - kinds)}] if possible - kinds else []
        booleans = [v for v in values if isinstance(v, bool)]
        if "boolean" in kinds & possible and (rest := [b for b in (True, False) if b not in booleans]):
            found.append({"enum": rest})
        if numbers and possible & NUMBER:
            if max(map(abs, numbers)) >= 2**63:
                raise Inexpressible("a number beyond 64 bits")
            bounds = [-math.inf, *numbers, math.inf]
            for low, high in itertools.pairwise(bounds):
                between: dict[str, Any] = {"type": ["number"]}
                between |= {"exclusiveMinimum": low} if low > -math.inf else {}
                between |= {"exclusiveMaximum": high} if high < math.inf else {}
                found.append(between)
        if "string" in kinds & possible:
            found.append({"type": ["string"], "notIn": [v for v in values if isinstance(v, str)]})
        if kinds & possible & {"array", "object"}:
            raise Inexpressible("a constant array or object")
        return found
