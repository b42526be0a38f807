"""Write a constraint as rules, for engines without readers of their own that keep it exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from infd.errors import GrammarFailed
from infd.grammar import bounds, regexes
from infd.grammar.automata import automaton, automaton_of, plain
from infd.grammar.json_rules import Documents
from infd.grammar.rules import EMPTY, ROOT, Reference, Rules
from infd.grammar.schema.rewriting import prepare
from infd.request import Choice, JsonObject, JsonSchema, Regex

if TYPE_CHECKING:
    from infd.grammar.protocol import Limits
    from infd.request import Constraint


def write(constraint: Constraint, limits: Limits) -> Rules:
    """Return the rules of a constraint.

    Raises GrammarFailed if it is malformed, too large, or of a kind or with a keyword that rules cannot keep.
    """
    match constraint:
        case JsonSchema(schema, whitespace, lenient, coerce_one_of):
            if lenient or coerce_one_of:
                _refuse("lenient and coerce_one_of are")
            return document(bounds.read_json(schema, limits), limits, whitespace)
        case JsonObject(whitespace):
            return document({"type": "object"}, limits, whitespace)
        case Regex(pattern):
            bounds.check_text(pattern, limits)
            bounds.check_nesting(pattern, limits)
            found = automaton(regexes.parse(pattern))
        case Choice(options):
            if not options:
                raise GrammarFailed("a choice of no option", code="invalid_grammar")
            bounds.check_enumerated(len(options), limits)
            bounds.check_text("".join(options), limits)
            found = automaton_of(options)
        case _:
            _refuse(f"{type(constraint).__name__} constraints are")
    written = found.rules("state", plain)
    return {ROOT: Reference("state0"), **written}


def document(schema: object, limits: Limits, whitespace: bool = True) -> Rules:
    """Return the rules of the documents that a client's schema accepts."""
    bounds.check_schema(schema, limits)
    prepared = prepare(schema)
    bounds.check_schema(prepared, replace(limits, depth=4 * limits.depth))  # rewriting nests, merges and enumerates
    found: Rules = {ROOT: EMPTY}
    found[ROOT] = Documents(found).write(prepared, whitespace=whitespace)
    return found


def _refuse(what: str) -> NoReturn:
    message = f"{what} kept by llguidance only, not by xgrammar, which grammar.engine names"
    raise GrammarFailed(message, code="unsupported_grammar")
