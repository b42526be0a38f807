"""Forced tokens are those in which the tokenizer writes the text that a grammar leaves no choice about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from infd import embedded
from infd.constraint import Choice, Constraint, JsonSchema, Lark, Regex, ThoughtBudget
from infd.drafting.drafter import NO_DRAFTS
from infd.drafting.forced import ForcedDrafter
from infd.engine.steps import constraints
from infd.grammar import budget, forcing
from infd.grammar.budget import BudgetGrammar
from infd.grammar.protocol import Limits, Matcher, Vocabulary
from infd.request import Request
from infd.scheduler.sequence import Sequence
from infd.text.tokenizer import Tokenizer
from tests.grammar import engines

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from infd.errors import GrammarFailed

pytestmark = pytest.mark.usefixtures("engine")
SCHEMA = """{"type": "object",
"properties": {"surname": {"type": "string"}, "place_of_birth": {"enum": ["Lyon", "Paris"]}},
"required": ["surname", "place_of_birth"], "additionalProperties": false}"""
TOKENIZER = Tokenizer.load(embedded.path())


@engines.each
def compiler():
    spellings = TOKENIZER.spellings()
    assert spellings is not None
    special, ends = TOKENIZER.special_ids, TOKENIZER.end_ids
    return engines.compiler(Vocabulary(spellings, special, ends, len(spellings), encode))


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def found(matcher: Matcher, most: int = 16, known: str = "") -> forcing.Forced:
    row = np.empty((1, compiler().vocabulary.words), dtype=np.int32)
    fill = lambda matchers, rows: budget.fill(compiler(), matchers, rows)  # noqa: E731
    assert fill([matcher], row) == [None]
    return forcing.forced(fill, compiler().vocabulary, matcher, row[0], most, encode(known))


def forced(matcher: Matcher, most: int = 16) -> list[int]:
    return found(matcher, most).tokens


def at(constraint: Constraint, text: str) -> Matcher:
    """Return a matcher that has read a text."""
    matcher = compiler().compile(constraint, Limits()).matcher()
    matcher.advance(encode(text))
    return matcher


@pytest.mark.parametrize(
    ("constraint", "text", "expected"),
    [
        (JsonSchema(SCHEMA, whitespace=False), "", '{"surname":'),  # `""` is a token
        (JsonSchema(SCHEMA, whitespace=False), '{"surname":"', ""),
        (JsonSchema(SCHEMA, whitespace=False), '{"surname":"Ann"', ',"place_of_birth":"'),
        (JsonSchema(SCHEMA, whitespace=False), '{"surname":"Ann","place_of_birth":"L', 'yon"}'),
        (JsonSchema(SCHEMA), '{"s', 'urname": "'),  # white space may follow the quote and the colon
        (Choice(("maybe tomorrow", "maybe today")), "", "maybe"),  # "today" is a token here
        (Choice(("maybe tomorrow", "maybe today")), "maybe tom", "orrow"),
        (Regex("[ab]+"), "a", ""),
        (Regex("(nine|none|no)[a-z]"), "", ""),
        (Lark('start: "the fixed text" /[0-9]/'), "", "the fixed text"),
    ],
)
def test_forced_text_ends_where_there_is_a_choice(constraint: Constraint, text: str, expected: str):
    matcher = at(constraint, text)
    tokens = forced(matcher)
    assert TOKENIZER.decode(tokens) == expected
    assert tokens == encode(expected)
    assert matcher.validate(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", '"surname": "'),  # nothing tells of white space yet, but most texts have it behind a colon
        ('{\n  "surname": "Ann",', '\n  "place_of_birth": "'),
        ('{\n  "surname": "Ann",\n', '  "place_of_birth": "'),
        ('{"surname":"Ann, Bob"', ',"place_of_birth":"'),
        ('{"surname": "Ann", "place_of_birth": "L', 'yon"}'),
    ],
)
def test_optional_white_space_is_assumed_to_be_as_before(text: str, expected: str):
    tokens, sure = found(at(JsonSchema(SCHEMA), text), known=text)
    assert TOKENIZER.decode(tokens) == expected
    assert not sure


ORDERS = """{"type": "object", "properties": {"orders": {"type": "array", "items": {"type": "object",
"properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": false}}},
"required": ["orders"], "additionalProperties": false}"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "', 'orders": [\n    {\n      "name": "'),
        ('{\n  "orders": [\n    {\n      "name": "Ann"', '\n    },\n    {\n      "name": "'),
        ('{\n  "orders": [\n    {\n      "name": "Ann"\n    }', ',\n    {\n      "name": "'),
        ('{"orders": [', '{"name": "'),
        ('{"orders": [{"name": "Ann"}', ',{"name": "'),
    ],
)
def test_arrays_are_assumed_to_have_elements_and_lines_to_be_indented(text: str, expected: str):
    tokens, sure = found(at(JsonSchema(ORDERS), text), 64, text)
    assert TOKENIZER.decode(tokens) == expected
    assert not sure


def test_elements_that_need_not_follow_are_likely_where_no_white_space_is_allowed():
    tokens, sure = found(at(JsonSchema(ORDERS, whitespace=False), '{"orders":['), 64, '{"orders":[')
    assert TOKENIZER.decode(tokens) == '{"name":"'
    assert not sure


def test_an_array_whose_end_is_forced_ends():
    one = ORDERS.replace('"type": "array"', '"type": "array", "maxItems": 1')
    assert TOKENIZER.decode(forced(at(JsonSchema(one, whitespace=False), '{"orders":[{"name":"Ann"}'))) == "]}"


@pytest.mark.parametrize(
    ("written", "expected", "exact"),
    [('{\n  "surname": "Ann",', '\n  "place_of_birth": "', True), ('{"', 'surname": "', False)],
)
def test_a_likely_name_takes_a_mask_a_token(written: str, expected: str, exact: bool):
    masks = Masks()
    row = np.empty((1, compiler().vocabulary.words), dtype=np.int32)
    matcher = at(JsonSchema(SCHEMA), written)
    masks.fill([matcher], row)
    tokens, _ = masks.forced(matcher, row[0], 16, encode(written), exact=exact)
    assert TOKENIZER.decode(tokens) == expected
    assert masks.filled <= 1 + len(tokens) + 2, "the white space in two tokens"


def test_a_longer_token_is_no_likelier_where_others_follow_that_no_token_joins():
    assert len(encode(":/")) == 1
    tokens, sure = found(at(Regex("x ?:(/|[0-9])"), ""))
    assert (TOKENIZER.decode(tokens), sure) == ("x:", False), "a digit may follow, too, but there is no token `:0`"


@pytest.mark.parametrize(
    ("written", "follows", "expected"),
    [
        (b'{\n  "a": 1,\n  "b": [1, 2]', b",", b""),
        (b'{\n  "a": 1,\n  "b": [1, 2],', b'"', b"\n  "),
        (b'{\n  "a": 1,\n  "b": [1, 2],\n', b'"', b"  "),
        (b'{\n  "a": 1,\n  "b": [1,', b"", b"\n  "),
        (b'[\n {"a": "x, y"},', b"{", b"\n "),
        (b'{"a":1,"b":', b"", b""),
        (b'{"a"', b":", b""),
        (b'{"a":', b"", b" "),
        (b"", b"{", b""),
        (b'{\n  "a": [', b"{", b"\n    "),
        (b'{\n  "a": [\n    {', b'"', b"\n      "),
        (b'{\n  "a [": [\n    {"b": 1', b"}", b""),
        (b'{\n  "a": [\n    {\n      "b": 1', b"}", b"\n    "),
        (b'{\n  "a": [\n    {\n      "b": 1\n    }', b"]", b"\n  "),
        (b'[\n\t{"a": 1}', b"]", b"\n"),
        (b'{"a": [', b"{", b""),
        (b'"a": [\n  1, {', b'"', b""),  # the beginning is not known
    ],
)
def test_white_space_is_assumed_as_it_was_between_the_same_characters_before(
    written: bytes, follows: bytes, expected: bytes
):
    assert forcing.blank(written, follows) == expected


class Masks:
    """Fills masks as Grammars does."""

    def __init__(self) -> None:
        self.closing = forcing.closing(compiler().vocabulary)
        self.filled = 0

    def fill(self, matchers: list[Matcher], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        self.filled += len(matchers)
        return budget.fill(compiler(), matchers, rows)

    def forced(
        self, matcher: Matcher, row: NDArray[np.int32], most: int, known: list[int], *, exact: bool
    ) -> forcing.Forced:
        return forcing.forced(self.fill, compiler().vocabulary, matcher, row, most, known, exact=exact)

    def behind(self, matcher: Matcher, row: NDArray[np.int32], most: int, known: list[int]) -> dict[int, list[int]]:
        return forcing.behind(self.fill, compiler().vocabulary, self.closing, matcher, row, most, known)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "surname": "An', {'",': '\n  "place_of_birth": "', '"': ',\n  "place_of_birth": "'}),
        ('{\n  "surname": ', {}),  # no value has begun
        ('{\n  "surname": "Ann",\n  "place_of_birth": "L', {}),  # forced to its end
    ],
)
def test_what_follows_the_end_of_a_string_is_sought_before_the_string_ends(text: str, expected: dict[str, str]):
    matcher, row = at(JsonSchema(SCHEMA), text), np.empty((1, compiler().vocabulary.words), dtype=np.int32)
    masks = Masks()
    masks.fill([matcher], row)
    seq = Sequence(Request(id="", prompt=(), wants=()), drafter=ForcedDrafter(NO_DRAFTS))
    choice = constraints.ConstrainedChoice(seq, compiler().compile(JsonSchema(SCHEMA), Limits()))
    choice.matcher = matcher
    (found,) = constraints.force(masks, [constraints.Sought(choice, 0, [], 9, encode(text), row[0], ahead=True)], 8)
    decode = TOKENIZER.decode
    assert {decode([token]): decode(run) for token, run in (found.behind or {}).items() if run} == expected
    assert all(run == encode(decode(run)) for run in (found.behind or {}).values())


def test_the_tokens_of_a_wide_mask_are_not_listed(monkeypatch: pytest.MonkeyPatch):
    lengths: list[int] = []
    listed = forcing.listed
    monkeypatch.setattr(forcing, "MOST_BLANK", 0)
    monkeypatch.setattr(forcing, "listed", lambda row: lengths.append(len(listed(row))) or listed(row))
    assert forced(at(JsonSchema(SCHEMA, whitespace=False), ""))
    assert 0 < max(lengths) <= forcing.MOST_ALLOWED, "a string's first character, of which there are thousands"


def test_forced_tokens_are_those_that_the_tokenizer_writes():
    text = "the quick brown fox jumps over the lazy dog"
    matcher = at(Lark(f'start: "{text}" /[0-9]/'), "")
    assert found(matcher) == (encode(text)[:16], True)
    assert forced(matcher, 2) == encode(text)[:2]


def test_a_forced_end_of_a_thought_is_drafted():
    words = TOKENIZER.spellings()
    assert words is not None
    closing = encode("</think>\n")
    thought = ThoughtBudget(
        tokens=3, openings=("<think>",), closings=("</think>",), forced=("</think>\n",), inside=True
    )
    matcher = BudgetGrammar(thought, compiler().vocabulary, [tuple(closing)], None).matcher()
    matcher.advance(encode("one two three four")[:3])
    assert forced(matcher)[: len(closing)] == closing
