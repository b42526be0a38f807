"""Stop strings end an answer at the right character, and no part of one is sent."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infd.text.reply import Reply
from infd.text.stops import StopStrings
from tests.text.vocabularies import KINDS, byte_level, wrap

if TYPE_CHECKING:
    from infd.text.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return wrap(byte_level())


def byte_ids(text: str) -> list[int]:
    """Return one id for each byte, so that characters are split too."""
    vocabulary = tokenizer()
    single = {vocabulary.piece(token_id): token_id for token_id in range(vocabulary.vocab_size)}
    return [single[bytes([byte])] for byte in text.encode()]


class Ended(NamedTuple):
    text: str
    stop: str | None
    tokens: int | None


def stream(
    ids: list[int],
    stops: list[str],
    batches: list[int] | None = None,
    *,
    skip_special_tokens: bool = True,
    included: bool = False,
    min_tokens: int = 0,
) -> Ended:
    """Feed ids in batches, check that no text is sent too early, and return the text."""
    rule = StopStrings(stops, included=included, min_tokens=min_tokens)
    reply = Reply(tokenizer(), rule, skip_special_tokens=skip_special_tokens)
    text, begin = "", 0
    for size in [*(batches or []), *([1] * len(ids))]:
        batch = ids[begin : begin + size]
        used = reply.feed(batch)
        text += reply.take()
        if used is not None:
            return Ended(text + reply.finish(), reply.stop_reason, begin + used)
        begin += size
    return Ended(text + reply.finish(), reply.stop_reason, None)


def whole(ids: list[int], stops: list[str], *, include: bool = False, min_tokens: int = 0) -> Ended:
    """Return the expected result, by searching all prefixes of the text."""
    vocabulary = tokenizer()
    for count in range(1, len(ids) + 1):
        before = vocabulary.decode(ids[: count - 1]).rstrip("\ufffd")
        after = vocabulary.decode(ids[:count]).rstrip("\ufffd")
        for end in range(len(before) + 1, len(after) + 1):
            found = [stop for stop in stops if after[:end].endswith(stop)]
            if found and count > min_tokens:
                stop = max(found, key=len)
                return Ended(after[:end] if include else after[: end - len(stop)], stop, count)
    return Ended(vocabulary.decode(ids), None, None)


letters = st.text("ab é🙂", max_size=16)
stop_lists = st.lists(st.text("ab é🙂", min_size=1, max_size=5), max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=letters, stops=stop_lists, batches=st.lists(st.integers(1, 5), max_size=8))
@example(text="abc", stops=["abcd", "bc"], batches=[])
@example(text="aaab", stops=["aab"], batches=[2])
def test_however_the_bytes_arrive_the_answer_is_that_of_the_whole_text(text: str, stops: list[str], batches: list[int]):
    ids = byte_ids(text)

    assert stream(ids, stops, batches) == whole(ids, stops)


@settings(max_examples=200, deadline=None)
@given(text=letters, stops=stop_lists, batches=st.lists(st.integers(1, 5), max_size=8))
def test_with_merged_tokens_too(text: str, stops: list[str], batches: list[int]):
    ids = tokenizer().encode(text, add_special_tokens=False)

    assert stream(ids, stops, batches) == whole(ids, stops)


@settings(max_examples=300, deadline=None)
@given(text=letters, stops=stop_lists, include=st.booleans(), min_tokens=st.integers(0, 10))
def test_min_tokens_and_inclusion_of_stop_strings_apply_to_the_whole_text(
    text: str, stops: list[str], include: bool, min_tokens: int
):
    ids = byte_ids(text)

    ended = stream(ids, stops, included=include, min_tokens=min_tokens)

    assert ended == whole(ids, stops, include=include, min_tokens=min_tokens)


@settings(max_examples=300, deadline=None)
@given(text=letters, stops=stop_lists)
def test_text_is_sent_as_soon_as_it_cannot_begin_a_stop_string(text: str, stops: list[str]):
    reply = Reply(tokenizer(), StopStrings(stops))
    sent = ""
    for count, token_id in enumerate(byte_ids(text), 1):
        if reply.feed([token_id]) is not None:
            break
        sent += reply.take()
        seen = text.encode()[:count].decode(errors="ignore")
        waiting = seen[len(sent) :]
        assert seen.startswith(sent)
        assert not waiting or any(stop.startswith(waiting) for stop in stops)
        assert not any(stop.startswith(seen[start:]) for start in range(len(sent)) for stop in stops)


def test_the_string_that_is_complete_first_ends_the_text():
    assert stream(byte_ids("xabcd"), ["abcd", "bc"]) == Ended("xa", "bc", 4)


def test_of_two_that_are_complete_together_the_longer_counts():
    assert stream(byte_ids("xabc"), ["bc", "abc"]) == Ended("x", "abc", 4)


def test_a_stop_string_may_end_inside_a_token():
    vocabulary = tokenizer()
    ids = vocabulary.encode("the quick brown fox", add_special_tokens=False)

    ended = stream(ids, ["ui"])

    assert ended.text == "the q"


def test_text_that_only_looked_like_a_stop_string_is_sent():
    assert stream(byte_ids("\n\nUsual"), ["\n\nUser:"]) == Ended("\n\nUsual", None, None)


def test_a_stop_string_that_does_not_count_yet_is_not_held_back():
    reply = Reply(tokenizer(), StopStrings(["ab", "bx"], min_tokens=9))
    reply.feed(byte_ids("ab"))

    assert reply.take() == "a"  # b may begin the other stop string
    assert Reply(tokenizer(), StopStrings(["ab"], min_tokens=9)).feed(byte_ids("ab")) is None


def test_held_text_is_sent_at_the_end():
    reply = Reply(tokenizer(), StopStrings(["END"]))
    reply.feed(byte_ids("THE EN"))

    assert reply.take() == "THE "
    assert reply.finish() == "EN"
    assert reply.stop_reason is None


def test_a_stop_string_that_only_the_end_completes_is_cut_off_too():
    reply = Reply(tokenizer(), StopStrings(["\ufffd"]))
    reply.feed(byte_ids("ok🙂")[:-1])

    assert reply.finish() == "ok"
    assert reply.stop_reason == "\ufffd"


def test_the_handler_may_read_late():
    reply = Reply(tokenizer(), StopStrings(["stop"]))

    assert reply.feed(byte_ids("go on")) is None
    assert reply.feed(byte_ids(" and stop here")) == len(" and stop")
    assert reply.take() == "go on and "
    assert reply.finish() == ""


def test_nothing_follows_a_stop():
    reply = Reply(tokenizer(), StopStrings(["."]))
    reply.feed(byte_ids("One. Two."))

    assert reply.finish() == "One"


def test_choices_share_the_strings_but_not_the_search():
    stops = StopStrings(["ab"])
    one, two = Reply(tokenizer(), stops), Reply(tokenizer(), stops)

    assert one.feed(byte_ids("a")) is None
    assert two.feed(byte_ids("b")) is None
    assert one.feed(byte_ids("b")) == 1
    assert two.finish() == "b"


def test_special_tokens_are_left_out_unless_asked_for():
    vocabulary = tokenizer()
    ids = [*byte_ids("a"), vocabulary.id_of("</s>") or 0, *byte_ids("b")]

    assert stream(ids, []).text == "ab"
    assert stream(ids, [], skip_special_tokens=False).text == "a</s>b"


@pytest.mark.parametrize("stops", [[], [""]])
def test_without_stop_strings_nothing_stops(stops: list[str]):
    assert stream(byte_ids("abc"), stops) == Ended("abc", None, None)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_answer_that_continues_a_text_keeps_the_space_before_its_first_word(kind: str):
    vocabulary = wrap(KINDS[kind]())
    ids = vocabulary.encode("the quick brown fox jumps over the lazy dog", add_special_tokens=False)
    for border in range(1, len(ids)):
        reply = Reply(vocabulary, preceding=ids[max(0, border - 8) : border])
        reply.feed(ids[border:])

        assert vocabulary.decode(ids[:border]) + reply.finish() == vocabulary.decode(ids)


def test_a_character_left_unfinished_before_an_answer_is_none_of_its_own():
    first = byte_ids("é")[0]
    reply = Reply(tokenizer(), preceding=[*byte_ids("a"), first])

    assert reply.finish() == ""
    reply = Reply(tokenizer(), preceding=[first])
    reply.feed(byte_ids("b"))
    assert reply.finish() == "b"
