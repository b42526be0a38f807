"""Write a constraint as grammars of llguidance: JSON schemas and Lark.

This module reads all texts of clients: it parses JSON, rewrites schemas and searches grammars. That work holds the GIL,
so the daemon runs this module in another process, see `trial`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from infd.constraint import (
    AfterThought,
    Calls,
    Choice,
    Constraint,
    Continuation,
    Ebnf,
    Headed,
    JsonObject,
    JsonSchema,
    Lark,
    Regex,
    StructuralTag,
)
from infd.errors import GrammarFailed
from infd.grammar import arguments, bounds, ebnf, inputs, lark, markup, parameters, structural
from infd.grammar.inputs import Input
from infd.grammar.regex_syntax import spelled
from infd.grammar.schema.rewriting import prepare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.constraint import Plain
    from infd.grammar.protocol import Limits
    from infd.grammar.rules import Rules

# White space between two tokens of a JSON document: one space, or a newline and the indentation of the next line.
# The amount is limited because a model may otherwise generate white space until its token limit.
WHITESPACE: Final = r"[ ]|\r?\n[ \t]{0,40}"

# Keywords with which compilation may take more than linear time.
_COSTLY: Final = ("allOf", "pattern", "patternProperties", "multipleOf")

# Schemas are compiled by recursion through their references, which takes about 8 KB of stack for each level.
_LEVELS: Final = 400


class Written(Struct, frozen=True):
    """A constraint as grammars of llguidance. Each grammar is the JSON text of an object.

    grammars   the first grammar refers to the others by name
    arguments  request field and schema of each tool's arguments, to find the schema that llguidance refuses
    refusal    llguidance's message if it refused a costly part of the constraint; None: it refused none
    """

    grammars: list[bytes]
    arguments: list[tuple[str, bytes]] = []
    refusal: str | None = None


class Draft(Struct):
    """A constraint as grammars of llguidance, before they are encoded as JSON.

    grammars   the first grammar refers to the others by name
    costly     grammars whose compilation may take long, without the rules that infd adds
    arguments  request field and schema of each tool's arguments
    """

    grammars: list[dict[str, Any]]
    costly: list[dict[str, Any]]
    arguments: list[tuple[str, dict[str, Any]]] = []

    def written(self) -> Written:
        arguments = [(param, encoded(grammar)) for param, grammar in self.arguments]
        return Written([encoded(grammar) for grammar in self.grammars], arguments)

    def behind(self, rules: Rules, name: str | None) -> Draft:
        """Return a draft whose first grammar is `rules`.

        name  name by which `rules` refer to the first grammar of this draft; None: `rules` refer to none but those
              that have a name
        """
        named = self.grammars if name is None else [{"name": name, **self.grammars[0]}, *self.grammars[1:]]
        return Draft([{"lark_grammar": lark.write(rules)}, *named], self.costly, self.arguments)


def write(constraint: Constraint, limits: Limits, marks: Mapping[str, int]) -> Draft:
    """Return a constraint as grammars. Raises GrammarFailed.

    marks  mark -> token id, for those marks of the constraint that a single token spells
    """
    match constraint:
        case Continuation(answer):
            return write(answer, limits, marks)
        case Headed(header, plain):
            draft, name = (Draft([], []), None) if plain is None else (write(plain, limits, marks), "headed")
            return draft.behind(markup.headed(header, name, marks.get), name)
        case AfterThought(thought, answer):
            draft = write(answer, limits, marks)
            return draft.behind(markup.after_thought(thought, marks.get), markup.AFTER)
        case Calls(_, tools, _, _, otherwise):
            schemas = arguments.prepared(tools, limits, _schema)
            draft, name = Draft([], []), None
            if otherwise is not None:
                draft, name = write(otherwise, limits, marks), "otherwise"
            if _is_costly([{"json_schema": schema} for schema in schemas]):
                expressions = [f"%json {json.dumps(schema)}" for schema in schemas]
                draft.costly.append({"lark_grammar": "start: " + " | ".join(expressions)})
            draft.arguments = [
                (tool.param, {"json_schema": schema}) for tool, schema in zip(tools, schemas, strict=True)
            ]
            written: list[Any] = schemas
            if constraint.syntax.parameter:
                written = [*parameters.parameters(tools, limits, constraint.syntax, _schema)]
            for number, tool in enumerate(tools):
                if tool.lark:
                    with arguments.named(tool):
                        grammar = {"lark_grammar": inputs.write(tool.lark, limits, constraint.syntax, marks)}
                    written[number] = Input(f"input_{number}")
                    draft.grammars.append({"name": f"input_{number}", **grammar})
                    draft.costly.append(grammar)
            return draft.behind(markup.calls(constraint, written, name, marks.get), name)
        case _:
            grammar = _grammar(constraint, limits)
            return Draft([grammar], [_without_specials(grammar)] if _is_costly([grammar]) else [])


def listed(grammars: Sequence[bytes]) -> bytes:
    """Join the JSON texts of grammars to the one JSON text that llguidance compiles."""
    return b'{"grammars": [' + b", ".join(grammars) + b"]}"


def named(name: str, grammar: bytes) -> bytes:
    """Return the JSON text of a grammar under a name, by which other grammars refer to the grammar."""
    return b'{"name": "%s", %s' % (name.encode(), grammar[1:])


def _grammar(constraint: Plain, limits: Limits) -> dict[str, Any]:
    """Return a constraint as a grammar of llguidance."""
    match constraint:
        case JsonSchema(schema, whitespace, lenient, coerce_one_of):
            parsed = bounds.read_json(schema, limits)
            return {"json_schema": _schema(parsed, limits, whitespace, lenient=lenient, coerce=coerce_one_of)}
        case JsonObject(whitespace):
            return {"json_schema": _schema({"type": "object"}, limits, whitespace)}
        case Regex(pattern):
            bounds.check_text(pattern, limits)
            bounds.check_nesting(pattern, limits)
            return {"lark_grammar": f"start: {lark.regex(spelled(pattern))}"}
        case Choice(options):
            if not options:
                raise GrammarFailed("a choice of no option", code="invalid_grammar")
            bounds.check_enumerated(len(options), limits)
            bounds.check_text("".join(options), limits)
            return {"lark_grammar": "start: OPTION\nOPTION: " + " | ".join(map(lark.string, options))}
        case Lark(grammar):
            return {"lark_grammar": lark.checked(grammar, limits, lambda schema: _schema(schema, limits))}
        case Ebnf(grammar):
            return {"lark_grammar": ebnf.to_lark(grammar, limits)}
        case StructuralTag(description):
            rules = structural.to_rules(description, limits, lambda schema: _schema(schema, limits))
            return {"lark_grammar": lark.write(rules)}


def _schema(
    schema: Any, limits: Limits, whitespace: bool = True, *, lenient: bool = False, coerce: bool = False
) -> dict[str, Any]:
    """Return a schema rewritten for exact enforcement, with infd's `x-guidance` options in place of the client's.

    If the client sets `lenient` or `coerce_one_of`, the schema is not rewritten, and llguidance may admit documents
    that the schema rejects.
    """
    bounds.check_schema(schema, limits)
    if not (lenient or coerce):
        return with_options(prepare(schema), limits, whitespace)
    if not isinstance(schema, dict):
        raise GrammarFailed("a schema is an object", code="invalid_grammar")
    return with_options(schema, limits, whitespace, lenient=lenient, coerce=coerce)


def with_options(
    schema: dict[str, Any], limits: Limits, whitespace: bool = True, *, lenient: bool = False, coerce: bool = False
) -> dict[str, Any]:
    """Return a schema with infd's `x-guidance` options. Raises GrammarFailed if the schema exceeds a limit."""
    # A rewritten schema may be nested deeper than the client's schema.
    bounds.check_schema(schema, replace(limits, depth=4 * limits.depth))
    options: dict[str, Any] = {"whitespace_flexible": whitespace, "lenient": lenient, "coerce_one_of": coerce}
    if whitespace:
        options["whitespace_pattern"] = WHITESPACE
    return {**schema, "x-guidance": options}


def _is_costly(grammars: list[dict[str, Any]]) -> bool:
    """Return whether compiling these llguidance grammars may take time or stack that nothing else bounds."""
    todo: list[Any] = [each.get("json_schema") or each["lark_grammar"] for each in grammars]
    schemas, refers = 0, False
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            schemas, refers = schemas + 1, refers or "$ref" in value
            if (refers and schemas > _LEVELS) or any(name in value for name in _COSTLY):
                return True
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return not all("json_schema" in each for each in grammars)


def _without_specials(grammar: dict[str, Any]) -> dict[str, Any]:
    text = grammar.get("lark_grammar")
    return grammar if text is None else {"lark_grammar": lark.without_specials(text)}


def encoded(grammar: dict[str, Any]) -> bytes:
    """Return a grammar's JSON text."""
    return json.dumps(grammar).encode()
