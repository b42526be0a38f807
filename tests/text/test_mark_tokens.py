"""Marks that are tokens of the vocabulary: text that spells them in other tokens is no mark."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from infd.text import answers, tools
from infd.text.chat import ChatTemplate
from infd.text.markup import Asides, Reading
from infd.text.reasoning.blocks import FAMILIES as THOUGHTS
from infd.text.reply import Reply
from infd.text.stops import StopStrings
from infd.text.syntax import Syntax
from infd.text.tools.offered import Offered
from tests.text.syntaxes import families
from tests.text.templates import TEMPLATES
from tests.text.transcripts import Message, message_of
from tests.text.vocabularies import KINDS, byte_level, wrap
from tests.thorough import among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.text.tokenizer import Tokenizer

FAMILIES = families()
CALLING = {  # families that begin a call with one token -> an answer of one call
    name: answer
    for name, family in FAMILIES.items()
    if "one call" in family.transcripts
    and (answer := family.transcripts["one call"][0]).startswith(
        tuple(mark for mark in tools.SYNTAXES[name].opens if mark in tools.SYNTAXES[name].marks)
    )
}
ASKED = "<|start|>user<|message|>hi<|end|><|start|>assistant"


def vocabulary_of(marks: Sequence[str]) -> Tokenizer:
    backend = byte_level()
    backend.add_special_tokens(list(marks))
    return wrap(backend)


def syntax_of(name: str) -> Syntax:
    marks = tools.SYNTAXES[name].marks
    words = vocabulary_of(marks)
    return Syntax(tools=tools.SYNTAXES[name], mark_ids=words.special_ids, tokens=tokens_of(words, marks))


def tokens_of(words: Tokenizer, marks: Sequence[str]) -> dict[int, str]:
    return {token_id: mark for mark in marks if (token_id := words.id_of(mark)) is not None}


def spelled(words: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text without the tokens of marks."""
    return [token_id for character in text for token_id in words.encode(character, add_special_tokens=False)]


def answered(syntax: Syntax, words: Tokenizer, ids: list[int], *stops: str, prompt: str = "", step: int = 1) -> Message:
    """Return the message of an answer whose tokens arrive in steps."""
    schemas = next((FAMILIES[name].schemas for name, known in tools.SYNTAXES.items() if known is syntax.tools), {})
    reading = syntax.start(prompt, offered=Offered(schemas))
    reply = Reply(words, StopStrings(stops), reading=reading, mark_ids=syntax.mark_ids, mark_tokens=syntax.tokens)
    content, asides = "", []
    for at in range(0, len(ids), step):
        reply.feed(ids[at : at + step])
        content += reply.take()
        asides.append(None if reading is None else reading.take())
    content += reply.finish()
    return message_of(content, [*asides, None if reading is None else reading.take()])


def test_most_families_begin_a_call_with_one_token():
    assert len(CALLING) > 30


@pytest.mark.parametrize("name", CALLING)
def test_a_call_that_the_model_quotes_in_other_tokens_is_content(name: str):
    syntax, call = syntax_of(name), CALLING[name]
    words = vocabulary_of(tools.SYNTAXES[name].marks)
    quoted = f"One writes\n{call} for that."
    for step in (1, 7, 1000):
        assert answered(syntax, words, spelled(words, quoted), step=step) == Message(quoted)

    called = FAMILIES[name].transcripts["one call"][1].calls
    real = words.encode(call, add_special_tokens=False)
    assert answered(syntax, words, real) == Message(calls=called)
    assert answered(syntax, words, spelled(words, quoted) + real) == Message(quoted, calls=called)
    assert answered(syntax, words, spelled(words, call) + real) == Message(call, calls=called)


@pytest.mark.parametrize("name", CALLING)
def test_a_spelled_call_with_which_the_answer_ends_is_a_call(name: str):
    syntax, family = syntax_of(name), FAMILIES[name]
    words = vocabulary_of(tools.SYNTAXES[name].marks)
    for what in ("one call", "two calls", "a text before two calls", "space before the call", "nothing but text"):
        if what in family.transcripts:
            answer, message = family.transcripts[what]
            assert answered(syntax, words, spelled(words, answer)) == message, what


def parsed(reading: Reading, parts: Sequence[tuple[str, bool]]) -> Message:
    """Parse parts of text, each the token of a mark or other text."""
    content, asides = "", []
    for part, token in parts:
        content += reading.feed_token(part, part) if token else reading.feed(part)
        asides.append(reading.take())
    content += reading.finish()
    return message_of(content, [*asides, reading.take()])


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.histories
def test_soups_of_tokens_and_spelled_marks_are_the_same_message_however_they_arrive(name: str):
    syntax, draw, refuted = syntax_of(name), random.Random(name), 0
    marks, call = tools.SYNTAXES[name].marks, CALLING[name]
    pieces = [*marks, *(mark[: len(mark) // 2] for mark in marks), call, call, call[: len(call) // 2]]
    pieces += ["{", "}", '"', "\n", " ", "a", "é", '{"name": "f", "arguments": {', call[len(call) // 2 :]]
    for _ in range(among(100, 150, 300)):
        drawn = [(piece, piece in marks and draw.random() < 0.4) for piece in draw.choices(pieces, k=draw.randrange(9))]
        text = "".join(piece for piece, _ in drawn)
        joined: list[tuple[str, bool]] = []  # neighbouring parts of other text in one part
        for piece, token in drawn:
            if joined and not token and not joined[-1][1]:
                joined[-1] = (joined[-1][0] + piece, False)
            else:
                joined.append((piece, token))
        offered = Offered({"f": b""})
        whole = parsed(syntax.start("", offered=offered), joined)
        characters = [
            part
            for piece, token in joined
            for part in ([(piece, True)] if token else [(each, False) for each in piece])
        ]
        assert parsed(syntax.start("", offered=offered), characters) == whole, joined
        if not whole.calls:
            assert whole == Message(text), joined
            refuted += parsed(Reading(calls=tools.SYNTAXES[name].start(offered)), [(text, False)]).calls != ()
    assert refuted


def test_a_quoted_mark_that_the_parser_had_held_back_is_not_the_token_that_follows():
    """The parser refuses a head without arguments once it is long; a mark within it was held back until then."""
    syntax, marks = syntax_of("deepseek_v3"), tools.SYNTAXES["deepseek_v3"].marks
    words = vocabulary_of(marks)
    section, separator = marks[0], tools.SYNTAXES["deepseek_v3"].marks[-1]
    quoted = f"function{separator}{'a' * 970}{section}"
    answer, message = FAMILIES["deepseek_v3"].transcripts["a text after the call"]
    opened = words.encode(section, add_special_tokens=False)

    ids = [*opened, *spelled(words, quoted), *words.encode(answer, add_special_tokens=False)]
    assert answered(syntax, words, ids) == Message(section + quoted + message.content, calls=message.calls)


def test_a_mark_counts_only_at_the_end_of_the_text_of_its_token():
    asides = Asides(tokens=frozenset({"<a>"}))
    asides.token = "<a>"
    assert asides.counts("<a>", "<a>b<a>", 7)
    assert not asides.counts("<a>", "<a>b<a>", 3)
    assert asides.find("<a>", "<a>b<a>") == 4


@pytest.mark.parametrize(
    "stops",
    [
        *(("<longcat_tool_call>!",), ("call>never",), ("</longcat_tool_call>!",)),
        *(("see.\n<longcat_tool_call>!",), ("}</longcat_tool_call>\n<longcat_tool_call>!",)),
    ],
)
def test_a_mark_that_may_begin_a_stop_string_is_still_a_token(stops: tuple[str, ...]):
    syntax, (answer, message) = syntax_of("longcat"), FAMILIES["longcat"].transcripts["a text before two calls"]
    words = vocabulary_of(tools.SYNTAXES["longcat"].marks)
    ids = words.encode(answer, add_special_tokens=False)

    assert answered(syntax, words, ids, *stops) == message
    assert answered(syntax, words, spelled(words, answer + " x"), *stops) == Message(answer + " x")


def test_a_stop_string_within_a_mark_ends_the_answer_before_it():
    syntax, words = syntax_of("hermes"), vocabulary_of(tools.SYNTAXES["hermes"].marks)
    ids = words.encode("Yes <tool_call>", add_special_tokens=False)
    assert answered(syntax, words, ids, "_call") == Message("Yes <tool")


@pytest.mark.parametrize("name", ["qwen3", "mistral", "minimax_m3", "k2_horizon", "seed_oss"])
def test_a_thought_that_quotes_its_closing_mark_goes_on(name: str):
    block = THOUGHTS[name]
    words = vocabulary_of(block.marks)
    opening, closing = words.id_of(block.opening), words.id_of(block.closing)
    assert opening is not None
    assert closing is not None
    syntax = Syntax(block, tools.SYNTAXES["hermes"], words.special_ids, tokens=tokens_of(words, block.marks))
    quoting = f"What is {block.closing}? A mark."

    thought = spelled(words, quoting)
    end = [closing, *spelled(words, f"It is {block.closing}.")]
    message = Message(f"It is {block.closing}.", quoting)
    assert answered(syntax, words, [opening, *thought, *end]) == message
    assert answered(syntax, words, [*thought, *end], prompt=block.opening) == message
    # A checkpoint that spells its marks spells the first one too.
    whole = spelled(words, f"{block.opening}a{block.closing}b")
    assert answered(syntax, words, whole) == Message("b", "a")


def test_a_thought_that_quotes_a_call_goes_on():
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    words = vocabulary_of(marks)
    tokens = tokens_of(words, marks)
    syntax = Syntax(THOUGHTS["qwen3"], tools.SYNTAXES["hermes"], words.special_ids, tokens=tokens)
    quoted = 'So:\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nor not.'
    thought = words.encode("<think>", add_special_tokens=False) + spelled(words, quoted)
    real = words.encode('\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', add_special_tokens=False)

    assert answered(syntax, words, thought + real) == Message("", quoted, (("f", "{}"),))


@pytest.mark.parametrize(
    ("name", "prompt", "begin", "end"),
    [
        ("harmony", ASKED, "<|channel|>final<|message|>", "<|return|>"),
        ("muse_glimmer", "<|start|>assistant", " to=user<|message|>", "<|eot|>"),
        ("inkling", "<|message_model|>", "<|content_text|>", "<|content_model_end_sampling|>"),
    ],
)
def test_a_message_that_quotes_the_marks_of_messages_goes_on(name: str, prompt: str, begin: str, end: str):
    whole = answers.SYNTAXES[name]
    words = vocabulary_of(whole.marks)
    syntax = Syntax(whole=whole, mark_ids=words.special_ids, tokens=tokens_of(words, whole.marks))
    quoted = f"It ends with {end}, then {' '.join(reversed(whole.marks))} and so on."

    def encoded(text: str) -> list[int]:
        return words.encode(text, add_special_tokens=False)

    for step in (1, 5, 1000):
        found = answered(
            syntax, words, [*encoded(begin), *spelled(words, quoted), *encoded(end)], prompt=prompt, step=step
        )
        assert found == Message(quoted)
    assert answered(syntax, words, encoded(begin + "a" + end), prompt=prompt) == Message("a")
    spelled_header = answered(syntax, words, spelled(words, f"{begin}a"), prompt=prompt)
    assert spelled_header.content.endswith("a")
    assert spelled_header.calls == ()


def choose(template: str, words: Tokenizer, **names: str) -> Syntax:
    return Syntax.choose(words, ChatTemplate({"default": template}, {"eos_token": "</s>"}), **names)


@pytest.mark.parametrize("special", [True, False])
def test_marks_are_tokens_if_the_template_writes_them_and_the_vocabulary_adds_them(special: bool):
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend = KINDS["byte_level"]()
    (backend.add_special_tokens if special else backend.add_tokens)(marks)
    words = wrap(backend)

    syntax = choose(TEMPLATES["qwen3"], words)
    assert syntax.tokens == tokens_of(words, marks)
    # The template does not write the marks that the settings name, so the model may have read them in other tokens.
    assert not choose("plain", words, tools_name="hermes", reasoning_name="qwen3").tokens
    # A vocabulary without such tokens.
    assert set(choose(TEMPLATES["qwen3"], wrap(byte_level())).tokens.values()) == {"<think>"}


def test_a_tokenizer_that_splits_special_tokens_has_no_marks_that_are_tokens():
    backend = KINDS["byte_level"]()
    backend.add_special_tokens(["<tool_call>", "</tool_call>"])
    words = wrap(backend, split_special=True)
    assert not choose(TEMPLATES["qwen2_5"], words).tokens
