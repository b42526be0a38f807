"""Rewrite `unevaluatedProperties`: split a schema into alternatives, each with a fixed set of evaluated properties."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from infd.grammar.schema.algebra import ALTERNATIVES, RESOLVED
from infd.grammar.schema.refusals import failed, invalid
from infd.grammar.schema.shapes import OTHERS

if TYPE_CHECKING:
    from infd.grammar.schema.negation import Negation
    from infd.grammar.schema.references import Convert, Definitions
    from infd.grammar.schema.refusals import Path
    from infd.grammar.schema.shapes import Schema

_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies")


class Evaluated(Struct, frozen=True):
    """A schema, and the properties that are evaluated in every document that the schema accepts.

    names       evaluated properties
    patterns    patternProperties whose matching properties are evaluated
    everything  whether all properties are evaluated
    """

    schema: Schema
    names: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    everything: bool = False


class Evaluation:
    """Rewrites `unevaluatedProperties`.

    convert  converts a node of the client's schema
    """

    def __init__(self, convert: Convert, definitions: Definitions, negation: Negation) -> None:
        self._convert = convert
        self._definitions = definitions
        self._negation = negation
        self._algebra = negation.algebra

    def closed(self, node: dict[str, Any], path: Path) -> Schema:
        """Convert a node with `unevaluatedProperties`. Raises GrammarFailed, Inexpressible."""
        rest = self._convert(node["unevaluatedProperties"], (*path, "unevaluatedProperties"))
        own = {k: v for k, v in node.items() if k != "unevaluatedProperties"}
        closed = []
        for each in self._alternatives(own, path, 0):
            known = {
                "properties": dict.fromkeys(each.names, True),
                "patternProperties": dict.fromkeys(each.patterns, True),
            }
            closing: Schema = True if each.everything else {**{k: v for k, v in known.items() if v}, OTHERS: rest}
            closed.append(self._algebra.conjunction([each.schema, closing]))
        return self._algebra.disjunction(closed)

    def _alternatives(self, node: Any, path: Path, depth: int) -> list[Evaluated]:
        """Return alternatives that together accept exactly the documents that `node` accepts."""
        if isinstance(node, bool):
            return [Evaluated(node)] if node else []
        if not isinstance(node, dict):
            raise invalid(path, "a schema is an object or a boolean")
        if depth > RESOLVED:
            raise failed(path, "unevaluatedProperties through recursive references is not supported")
        own = {k: v for k, v in node.items() if k not in _APPLICATORS}
        base = Evaluated(
            self._convert(own, path),
            tuple(own.get("properties", ())),
            tuple(own.get("patternProperties", ())),
            OTHERS in own or "unevaluatedProperties" in own,
        )
        found = [base]
        if "$ref" in node:
            self._definitions.name(node["$ref"], (*path, "$ref"), self._convert)
            target, _ = self._definitions.references.target(node["$ref"], (*path, "$ref"))
            found = self._product(found, self._alternatives(target, (*path, "$ref"), depth + 1), path)
        for i, s in enumerate(node.get("allOf", ())):
            found = self._product(found, self._alternatives(s, (*path, "allOf", i), depth + 1), path)
        if "anyOf" in node:
            found = self._any_of(found, node["anyOf"], path, depth)
        if "oneOf" in node:
            found = self._product(found, self._one_of(base.schema, node["oneOf"], path, depth), path)
        if "if" in node:
            found = self._product(found, self._if(base.schema, node, path, depth), path)
        for keyword in ("dependentSchemas", "dependencies"):
            for name, needed in node.get(keyword, {}).items():
                absent = {"properties": {name: False}}
                present = {"type": ["object"], "required": [name]}
                schema = {"required": needed} if isinstance(needed, list) else needed
                having = self._alternatives(schema, (*path, keyword, name), depth + 1)
                found = self._product(found, [Evaluated(absent), *(self._within(present, e) for e in having)], path)
        return found

    def _any_of(self, found: list[Evaluated], options: list[Any], path: Path, depth: int) -> list[Evaluated]:
        """Return alternatives for each set of options that a document may satisfy.

        The properties evaluated in a document depend on all options that the document satisfies.
        """
        several = [self._alternatives(s, (*path, "anyOf", i), depth + 1) for i, s in enumerate(options)]
        if 2 ** len(several) > ALTERNATIVES:
            raise failed(path, "unevaluatedProperties has too many alternatives", "grammar_too_large")
        every = []
        for n in range(1, len(several) + 1):
            for chosen in itertools.combinations(several, n):
                product = found
                for each in chosen:
                    product = self._product(product, each, path)
                every += product
        return every

    def _one_of(self, base: Schema, options: list[Any], path: Path, depth: int) -> list[Evaluated]:
        converted = [self._convert(s, (*path, "oneOf", i)) for i, s in enumerate(options)]
        alone = self._negation.exclusive_options(converted, base, (*path, "oneOf"))
        return [
            self._within(alone[i], each)
            for i, s in enumerate(options)
            for each in self._alternatives(s, (*path, "oneOf", i), depth + 1)
        ]

    def _if(self, base: Schema, node: dict[str, Any], path: Path, depth: int) -> list[Evaluated]:
        conditions = self._alternatives(node["if"], (*path, "if"), depth + 1)
        holds = [
            self._joined(a, b)
            for a in conditions
            for b in self._alternatives(node.get("then", True), (*path, "then"), depth + 1)
        ]
        without = self._negation.of(self._convert(node["if"], (*path, "if")), base)
        fails = self._algebra.disjunction(without)
        others = self._alternatives(node.get("else", True), (*path, "else"), depth + 1)
        return [*holds, *(self._within(fails, each) for each in others)]

    def _product(self, found: list[Evaluated], several: list[Evaluated], path: Path) -> list[Evaluated]:
        """Return the conjunctions of all pairs of two lists of alternatives."""
        self._algebra.step(len(found) * len(several))
        if len(found) * len(several) > ALTERNATIVES:
            raise failed(path, "unevaluatedProperties has too many alternatives", "grammar_too_large")
        return [self._joined(a, b) for a in found for b in several]

    def _joined(self, a: Evaluated, b: Evaluated) -> Evaluated:
        schema = self._algebra.conjunction([a.schema, b.schema])
        return Evaluated(schema, (*a.names, *b.names), (*a.patterns, *b.patterns), a.everything or b.everything)

    def _within(self, schema: Schema, each: Evaluated) -> Evaluated:
        """Return an alternative limited to the documents that `schema` accepts."""
        conjunction = self._algebra.conjunction([schema, each.schema])
        return Evaluated(conjunction, each.names, each.patterns, each.everything)
