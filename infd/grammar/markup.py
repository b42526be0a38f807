"""Write thoughts and tool calls as rules: free text up to a mark, and constrained text after the mark.

If exactly one token of the vocabulary spells a mark, the grammar admits the mark only as that token, and the free text
before the token never contains the mark. So a parser that searches the answer for marks finds only marks that the
grammar has placed. Any other mark is matched by its bytes, in any division into tokens.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from infd.constraint import AfterThought, Calls, Headed
from infd.errors import GrammarFailed
from infd.grammar.arguments import named as named_tool
from infd.grammar.inputs import INPUT, Input
from infd.grammar.rules import (
    EMPTY,
    ROOT,
    Alternatives,
    Characters,
    Document,
    Pattern,
    Reference,
    Repeated,
    Sequence,
    Text,
    Token,
    Until,
    Without,
    ranges_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Many
    from typing import Any

    from infd.constraint import CallSyntax, Constraint, Header, Thought
    from infd.grammar.parameters import Parameter, Parameters
    from infd.grammar.protocol import Vocabulary
    from infd.grammar.rules import Expression, Rules

    TokenOf = Callable[[str], int | None]


AFTER: Final = "after"
NUMBER: Final = "$number"
SHORT_ID: Final = "$id"


def _characters(*pairs: tuple[str, str]) -> Characters:
    return Characters(ranges_of([(ord(low), ord(high)) for low, high in pairs]))


_WORD: Final = _characters(("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z"))
_IDENTIFIER: Final = Sequence((_characters(("A", "Z"), ("_", "_"), ("a", "z")), Repeated(_WORD, 0, 63)))
_KEY: Final = Repeated(_characters(("-", "."), ("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z")), 1, 64)

# Placeholders in a CallSyntax -> the text that the model generates in their place.
_GENERATED: Final[dict[str, Expression]] = {
    NUMBER: Repeated(_characters(("0", "9")), 1, 3),
    SHORT_ID: Repeated(_characters(("0", "9"), ("A", "Z"), ("a", "z")), 9, 9),
}


class Marks:
    """Finds the tokens of a vocabulary that spell marks.

    The cache has no bound, because marks are few: they are defined by syntaxes, not by clients.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._found: dict[str, int | None] = {}

    def token_of(self, mark: str) -> int | None:
        """Return the id of the only token that spells a mark; None if no token or several tokens do."""
        if mark not in self._found:
            tokens, spelled = self._vocabulary.tokens, mark.encode()
            ends = self._vocabulary.end_ids
            found = [each for each, token in enumerate(tokens) if token == spelled and each not in ends]
            self._found[mark] = found[0] if len(found) == 1 else None
        return self._found[mark]

    def within(self, constraint: Constraint) -> dict[str, int]:
        """Return mark -> token id, for those marks of a constraint's thought and calls that a single token spells."""
        found = ((mark, self.token_of(mark)) for mark in _marks_of(constraint))
        return {mark: token for mark, token in found if token is not None}


def after_thought(thought: Thought, token_of: TokenOf) -> Rules:
    """Return the rules of a thought followed by an answer, whose grammar has the name AFTER.

    token_of  returns the id of the token that spells a mark; None if no token does
    """
    inside, rules = _text_to(thought.closing, "thought", thought.marks, token_of)
    if thought.newlines:
        rules["NEWLINES"] = Pattern(rf"\n{{1,{thought.newlines}}}")
        inside += (Repeated(Reference("NEWLINES"), 0, 1),)
    inside += _spelled(thought.after, thought.marks, token_of)
    if not thought.inside:
        opening = _spelled(thought.opening, thought.marks or (thought.opening,), token_of)
        inside = (Repeated(Sequence((*opening, *inside)), 0, 1),)
    return {ROOT: Sequence((*inside, Reference(AFTER))), **rules}


def headed(header: Header, answer: str | None, token_of: TokenOf) -> Rules:
    """Return the rules of a header followed by an answer.

    answer    name of the answer's grammar; None: any text without the header's marks, optionally with `header.closing`
              and `header.end` after the text
    token_of  as in `after_thought`
    """
    written = _spelled(header.text, header.marks, token_of)
    if answer is not None:
        closing = _spelled(header.closing + header.end, header.marks, token_of)
        closed = (Repeated(Sequence(closing), 0, 1),) if closing else ()
        return {ROOT: Sequence((*written, Reference(answer), *closed))}
    rest: Expression = Reference("REST")
    rules: Rules = {"REST": Without(header.marks)}
    if header.closing:
        content, more = _text_to(header.closing, "content", header.marks, token_of)
        rest = Alternatives((Sequence((*content, *_spelled(header.end, header.marks, token_of))), rest))
        rules |= more
    return {ROOT: Sequence((*written, rest)), **rules}


def calls(called: Calls, arguments: Many[Any], otherwise: str | None, token_of: TokenOf) -> Rules:
    """Return the rules of an answer with tool calls.

    arguments  for each tool, the prepared schema of its arguments, its Parameters or its Input
    otherwise  name of the grammar of an answer without calls; None: text that matches `syntax.otherwise`; if that
               is empty, any text
    token_of   as in `after_thought`
    """
    syntax = called.syntax
    head, _, rest = syntax.call.partition("$name")
    middle, _, tail = rest.partition("$arguments")

    def spelled(text: str) -> tuple[Expression, ...]:
        return _spelled(text, syntax.marks, token_of)

    named = [
        Sequence((*spelled(tool.name + middle.replace("$name", tool.name)), Reference(f"arguments_{number}")))
        for number, tool in enumerate(called.tools)
    ]
    first = syntax.begin + head
    assert first.startswith(syntax.trigger)
    rules: Rules = {}
    for number, (tool, argument) in enumerate(zip(called.tools, arguments, strict=True)):
        rule = f"arguments_{number}"
        with named_tool(tool):
            if isinstance(argument, Input):
                rules[rule] = _input(argument, syntax, token_of)
            elif syntax.parameter:
                rules |= _parameters(rule, argument, syntax, token_of)
            else:
                rules[rule] = Document(argument)
    rules["called"] = Sequence((Alternatives(tuple(named)), *spelled(tail)))
    parallel = called.parallel and syntax.between is not None
    further = Sequence((*spelled((syntax.between or "") + head), Reference("called")))
    several = (Repeated(further, 0, None),) if parallel else ()
    rules["calls"] = Sequence((Reference("called"), *several, *spelled(syntax.end)))
    begun = Sequence((*spelled(first), Reference("calls")))
    if called.required:
        return {ROOT: begun, **rules}
    if isinstance(called.otherwise, Headed) and called.otherwise.answer is None and called.otherwise.header.closing:
        header = called.otherwise.header
        content, more = _text_to(header.closing, "before", header.marks, token_of)
        before = Sequence((*_spelled(header.text, header.marks, token_of), *content))
        rules |= more
        begun = Sequence((Repeated(before, 0, 1), begun))
    if otherwise is not None:
        return {ROOT: Alternatives((begun, Reference(otherwise))), **rules}
    if syntax.otherwise:
        text = Without(syntax.marks, (syntax.otherwise,)) if syntax.marks else Pattern(syntax.otherwise)
        return {ROOT: Alternatives((begun, Reference("REST"))), **rules, "REST": text}
    to_call, free = _text_to(syntax.trigger, "free", syntax.marks, token_of)
    begun = Sequence((*to_call, *spelled(first.removeprefix(syntax.trigger)), Reference("calls")))
    rules |= {**free, "REST": Without((syntax.trigger,))}
    return {ROOT: Sequence((Repeated(begun, 0, None if parallel else 1), Reference("REST"))), **rules}


def _input(argument: Input, syntax: CallSyntax, token_of: TokenOf) -> Expression:
    """Return the arguments of a custom tool: the text of its grammar as the only argument."""
    text: tuple[Expression, ...] = (Reference(argument.name),)
    if not syntax.parameter:
        space = Repeated(Text(" "), 0, 1)
        opening = (Text("{"), space, Text(f'"{INPUT}"'), space, Text(":"), space, Text('"'))
        return Sequence((*opening, *text, Text('"'), space, Text("}")))
    if syntax.quoted:
        text = (Text('"'), *text, Text('"'))
    before, _, after = syntax.parameter.replace("$key", INPUT).partition("$value")
    return Sequence((*_spelled(before, syntax.marks, token_of), *text, *_spelled(after, syntax.marks, token_of)))


def _parameters(rule: str, parameters: Parameters, syntax: CallSyntax, token_of: TokenOf) -> Rules:
    """Return the rule `rule` for the arguments of a call, written one by one, and the rules to which `rule` refers."""
    rules: Rules = {}
    parts: list[tuple[Expression, int, int | None]] = []  # expression, least and most repetitions
    for number, parameter in enumerate(parameters.named):
        written = Alternatives(tuple(_parameter(f"{rule}_{number}", parameter, syntax, token_of, rules)))
        parts.append((written, int(parameter.required), 1))
    if parameters.other is not None and "$key" not in syntax.parameter.partition("$value")[2]:
        written = Alternatives(tuple(_parameter(f"{rule}_other", parameters.other, syntax, token_of, rules)))
        parts.append((written, 0, None))
    return {rule: _separated(rule, parts, _spelled(syntax.separator, syntax.marks, token_of), rules), **rules}


def _separated(
    rule: str, parts: Many[tuple[Expression, int, int | None]], separator: tuple[Expression, ...], rules: Rules
) -> Expression:
    """Return the expression of a sequence of parts, with a separator between consecutive present parts.

    parts  each part with its least and most repetitions; if the least is 0, the part may be absent

    With a separator, adds two rules for each part to `rules`; each rule matches that part and all later parts. The
    first applies if no earlier part is present; the second applies if one is present, and begins with a separator. The
    number of rules grows linearly with the number of parts, the number of combinations of present parts exponentially.
    """
    if not separator:
        return Sequence(
            tuple(Repeated(part, least, most) if (least, most) != (1, 1) else part for part, least, most in parts)
        )
    first: Expression = EMPTY
    behind: Expression = EMPTY
    for number in range(len(parts) - 1, -1, -1):
        part, least, most = parts[number]
        again = Sequence((*separator, part))
        rest = (Repeated(again, 0, None),) if most is None else ()
        begun = Sequence((part, *rest, behind))
        followed = Sequence((again if least else Repeated(again, 0, most), behind))
        rules[f"{rule}_{number}_first"] = begun if least else Alternatives((begun, first))
        rules[f"{rule}_{number}_behind"] = followed
        first, behind = Reference(f"{rule}_{number}_first"), Reference(f"{rule}_{number}_behind")
    return first


def _parameter(
    name: str, parameter: Parameter, syntax: CallSyntax, token_of: TokenOf, rules: Rules
) -> Iterator[Expression]:
    """Yield the alternatives of one argument; add the rules to which the alternatives refer to `rules`.

    name       prefix of the names of the added rules
    parameter  an empty `key` stands for any key
    """

    def spelled(text: str) -> tuple[Expression, ...]:
        return _spelled(text, syntax.marks, token_of)

    def around(written: str) -> tuple[tuple[Expression, ...], str]:
        before, _, after = written.partition("$key")
        middle, _, tail = after.partition("$value")
        tail = tail.replace("$key", parameter.key)
        key = Text(parameter.key) if parameter.key else _IDENTIFIER if syntax.quoted else _KEY
        return (*spelled(before), key, *spelled(middle)), tail

    begun, tail = around(syntax.parameter)
    mark = tail.strip()
    marks = (mark, *syntax.excluded)
    for text in parameter.texts:
        if not syntax.quoted and any(each in text for each in marks):
            raise GrammarFailed(f"a string with {mark} in it", code="unsupported_grammar")
    if parameter.texts:
        yield Sequence((*begun, Alternatives(tuple(map(Text, parameter.texts))), *spelled(tail)))
    if parameter.free:
        # The parser drops one newline before the mark, so a pattern must match the text without this newline. For that,
        # the newline is appended to each pattern, and becomes required. In a text without patterns it is optional.
        newline = tail[: len(tail) - len(tail.lstrip())]
        within = tuple(f"(?:{pattern}){newline}" for pattern in parameter.patterns)
        value, written = _text_to(mark, name, syntax.marks, token_of, syntax.excluded, within)
        rules |= written
        yield Sequence((*begun, *value, *spelled(tail.partition(mark)[2])))
    for number, document in enumerate(parameter.documents):
        rules[f"{name}_{number}"] = Document(document)
        begun, tail = around(syntax.document or syntax.parameter)
        yield Sequence((*begun, Reference(f"{name}_{number}"), *spelled(tail)))


def _text_to(
    mark: str,
    name: str,
    marks: Many[str],
    token_of: TokenOf,
    excluded: Many[str] = (),
    within: tuple[str, ...] = (),
) -> tuple[tuple[Expression, ...], Rules]:
    """Return the parts of a text up to and including its first `mark`, and the rules to which the parts refer.

    name      name of the rule; in capitals if the rule is a terminal
    marks     marks that `mark` may contain; a mark that a single token spells becomes that token
    excluded  further texts that must not occur before the mark
    within    patterns that the text before the mark must match
    """
    parts = _spelled(mark, (mark, *marks), token_of)
    place = next((place for place, part in enumerate(parts) if isinstance(part, Token)), None)
    if place is None:
        return (Reference(name),), {name: Until(mark, (mark, *excluded), within)}
    # Text never matches a special token. So the terminal ends where the mark's first token begins; it includes the part
    # of the mark before that token.
    before = re.escape("".join(part.text for part in parts[:place] if isinstance(part, Text)))
    if before:
        within = tuple(f"(?:{pattern}){before}" for pattern in within or ("(?s:.)*",))
    terminal = name.upper()
    return (Reference(terminal), *parts[place:]), {terminal: Without((mark, *excluded), within)}


def _spelled(text: str, marks: Many[str], token_of: TokenOf) -> tuple[Expression, ...]:
    """Return the parts of a text. A mark becomes a Token if one token of the vocabulary spells the mark."""
    known = [re.escape(mark) for mark in sorted(marks, key=len, reverse=True) if token_of(mark) is not None]
    parts = re.split(f"({'|'.join([*known, re.escape(NUMBER), re.escape(SHORT_ID)])})", text)
    spelled: list[Expression] = []
    for at, part in enumerate(parts):
        if part in _GENERATED:
            spelled.append(_GENERATED[part])
        elif part:
            spelled.append(_mark(part, token_of) if at % 2 else Text(part))
    return tuple(spelled)


def _mark(mark: str, token_of: TokenOf) -> Expression:
    token = token_of(mark)
    return Text(mark) if token is None else Token(token)


def _marks_of(constraint: Constraint) -> set[str]:
    match constraint:
        case Headed(header, answer):
            return set(header.marks) | (set() if answer is None else _marks_of(answer))
        case AfterThought(thought, answer):
            return {thought.opening, thought.closing, *thought.marks} | _marks_of(answer)
        case Calls(syntax, _, _, _, otherwise):
            marks = {syntax.trigger, *syntax.marks} - {""}
            return marks | (set() if otherwise is None else _marks_of(otherwise))
    return set()
