"""Write a constraint as rules of characters, texts and tokens. xgrammar enforces only such rules exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from msgspec.structs import replace

from infd.constraint import AfterThought, Calls, Choice, Ebnf, Headed, JsonObject, JsonSchema, Regex, StructuralTag
from infd.errors import GrammarFailed
from infd.grammar import arguments, bounds, ebnf, markup, parameters, regexes, structural
from infd.grammar.automata import Join, Set, Times, Union, automaton, automaton_of, literal, plain
from infd.grammar.json_rules import Documents
from infd.grammar.regex_syntax import spelled
from infd.grammar.regulars import Regulars
from infd.grammar.rules import (
    ANY,
    EMPTY,
    ROOT,
    Alternatives,
    Document,
    Pattern,
    Reference,
    Until,
    Without,
    recursive,
    renamed,
    trimmed,
)
from infd.grammar.schema.rewriting import prepare

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from infd.constraint import Constraint
    from infd.grammar.automata import Automaton, Regular
    from infd.grammar.markup import TokenOf
    from infd.grammar.protocol import Limits
    from infd.grammar.rules import Expression, Rules

_ANYTHING: Final = Times(Set(ANY), 0, None)


def write(constraint: Constraint, limits: Limits, token_of: TokenOf) -> Rules:
    """Return the rules of a constraint.

    token_of  returns the id of the token that spells a mark; None if no token does

    Raises GrammarFailed if the constraint is malformed or too large, or if rules cannot express it.
    """
    writer = _Writer(limits, token_of)
    writer.rules[ROOT] = writer.constraint(constraint)
    found = trimmed(writer.rules)
    if found is None:
        raise GrammarFailed("no text satisfies the constraint", code="invalid_grammar")
    return found


class _Writer:
    """Writes constraints as expressions. `rules` collects the rules to which the expressions refer."""

    def __init__(self, limits: Limits, token_of: TokenOf) -> None:
        self.rules: Rules = {ROOT: EMPTY}
        self._limits = limits
        self._token_of = token_of
        self._documents = Documents(self.rules)

    def constraint(self, constraint: Constraint) -> Expression:
        limits = self._limits
        match constraint:
            case Headed(header, plain):
                named = {} if plain is None else {"headed": self.constraint(plain)}
                name = None if plain is None else "headed"
                return self._added(markup.headed(header, name, self._token_of), named)
            case AfterThought(thought, answer):
                after = self.constraint(answer)
                return self._added(markup.after_thought(thought, self._token_of), {markup.AFTER: after})
            case Calls(_, tools, _, _, otherwise):
                for tool in tools:
                    if tool.lark:
                        with arguments.named(tool):
                            _refuse("grammars in Lark are")
                expressions = arguments.prepared(tools, limits, self._document)
                for tool, expression in zip(tools, expressions, strict=True):
                    if trimmed({**self.rules, ROOT: expression}) is None:
                        raise GrammarFailed(
                            "no arguments satisfy the schema", code="unsupported_grammar", param=tool.param
                        )
                written: Many[Any] = expressions
                if constraint.syntax.parameter:
                    written = parameters.parameters(tools, limits, constraint.syntax, self._document)
                others = {} if otherwise is None else {"otherwise": self.constraint(otherwise)}
                name = None if otherwise is None else "otherwise"
                return self._added(markup.calls(constraint, written, name, self._token_of), others)
            case JsonSchema(schema, whitespace, lenient, coerce_one_of):
                if lenient or coerce_one_of:
                    _refuse("lenient and coerce_one_of are")
                return self._document(bounds.read_json(schema, limits), limits, whitespace)
            case JsonObject(whitespace):
                return self._document({"type": "object"}, limits, whitespace)
            case Regex(pattern):
                bounds.check_text(pattern, limits)
                bounds.check_nesting(pattern, limits)
                return self._machine(automaton(regexes.parse(spelled(pattern))))
            case Choice(options):
                if not options:
                    raise GrammarFailed("a choice of no option", code="invalid_grammar")
                bounds.check_enumerated(len(options), limits)
                bounds.check_text("".join(options), limits)
                return self._machine(automaton_of(options))
            case Ebnf(grammar):
                return self._ebnf(ebnf.parse(grammar, limits))
            case StructuralTag(description):
                return self._added(structural.to_rules(description, limits, lambda s: self._document(s, limits)), {})
        return _refuse("grammars in Lark are")

    def _document(self, schema: Any, limits: Limits, whitespace: bool = True) -> Expression:
        """Return the expression of the documents that a client's schema accepts."""
        bounds.check_schema(schema, limits)
        prepared = prepare(schema)
        # A rewritten schema may be nested deeper than the client's schema.
        bounds.check_schema(prepared, replace(limits, depth=4 * limits.depth))
        return self._documents.write(prepared, whitespace=whitespace)

    def _ebnf(self, rules: Rules) -> Expression:
        if not recursive(rules):
            try:
                return self._machine(automaton(Regulars(rules).of(rules[ROOT])))
            except GrammarFailed as error:
                if error.code != "grammar_too_large":
                    raise
        return self._added(rules, {})

    def _added(self, rules: Rules, others: Rules) -> Expression:
        """Add `rules` and `others` under new names; return a reference to the root of `rules`.

        others  name -> expression of another grammar to which `rules` refer by this name
        """
        names = {name: f"{len(self.rules)}.{name}" for name in {**rules, **others}}
        for name, expression in renamed({**rules, **others}, names).items():
            self.rules[name] = EMPTY
            self.rules[name] = self._lowered(expression)
        return Reference(names[ROOT])

    def _lowered(self, expression: Expression) -> Expression:
        """Return the body of a rule. A Pattern, Document, Until or Without becomes characters, texts and tokens."""
        match expression:
            case Pattern(pattern):
                return self._machine(automaton(regexes.parse(pattern)))
            case Document(written):
                assert not isinstance(written, dict)
                return written  # type: ignore[no-any-return]
            case Until(mark, marks, within):
                ended = automaton(Join((_ANYTHING, literal(mark))))
                for pattern in within:
                    ended = ended.both(automaton(Join((regexes.parse(pattern), literal(mark)))))
                return self._machine(
                    ended.without(automaton(Join((_ANYTHING, _one_of(marks), Times(Set(ANY), 1, None)))))
                )
            case Without(marks, within):
                free = automaton(_ANYTHING)
                for pattern in within:
                    free = free.both(automaton(regexes.parse(pattern)))
                return self._machine(free.without(automaton(Join((_ANYTHING, _one_of(marks), _ANYTHING)))))
        return expression

    def _machine(self, found: Automaton) -> Expression:
        prefix = f"{len(self.rules)}-"
        self.rules |= found.rules(prefix, plain)
        return Reference(f"{prefix}0") if not found.empty else Alternatives(())


def _one_of(marks: tuple[str, ...]) -> Regular:
    return Union(tuple(map(literal, marks)))


def _refuse(what: str) -> NoReturn:
    message = f"{what} kept by llguidance only, not by xgrammar, which grammar.engine names"
    raise GrammarFailed(message, code="unsupported_grammar")
