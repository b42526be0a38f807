"""Collecting an answer that is not streamed."""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from infd.errors import NothingAllowed
from infd.http.answer import ChoiceDelta
from infd.http.gathering import Gathering
from infd.http.pieces import PIECE_TOKENS
from infd.request import FinishReason, TokenLogprobs
from tests.http.test_formats import chat_format, completion_format

if TYPE_CHECKING:
    from infd.http.formats.base import Format

TOKENS = 64 * PIECE_TOKENS
LIKELY = 21  # alternatives per token; CPython's free lists keep shorter tuples, which would count as used memory


def generated(token: int) -> ChoiceDelta:
    """Return a delta of one token with LIKELY alternatives, made of new objects only."""
    likely = TokenLogprobs(-token / 7, tuple(range(300, 300 + LIKELY)), tuple(-(token + i) / 7 for i in range(LIKELY)))
    return ChoiceDelta(0, "b", [300], [likely])


@pytest.mark.parametrize(
    "format", [completion_format(logprobs=LIKELY, n=1), chat_format(logprobs=True, top_logprobs=LIKELY, n=1)]
)
def test_log_probabilities_take_no_more_memory_than_in_the_body(format: Format):
    format.encode_logprobs(generated(0))  # first use builds the tokenizer's table
    gathering = Gathering(1, format.encode_logprobs)
    tracemalloc.start()
    try:
        for token in range(TOKENS):
            gathering.add([generated(token)])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    (choice,) = gathering.finish(1, 1)
    encoded = sum(len(piece) for pieces in choice.encoded_logprobs.values() for piece in pieces)
    assert encoded < held < 1.1 * encoded


@pytest.mark.parametrize("count", [1, PIECE_TOKENS - 1, PIECE_TOKENS, 3 * PIECE_TOKENS + 1])
def test_gathered_in_any_cuts_a_choice_is_the_same(count: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)  # of creation, which bodies contain
    bodies = []
    for cut in (1, count):
        format = completion_format(logprobs=2, n=1)
        gathering = Gathering(1, format.encode_logprobs)
        for first in range(0, count, cut):
            tokens = [generated(token) for token in range(first, min(count, first + cut))]
            logprobs = [each for delta in tokens for each in delta.logprobs]
            gathering.add([ChoiceDelta(0, "b" * len(tokens), [300] * len(tokens), logprobs)])
        gathering.add([ChoiceDelta(0, "", [], [], FinishReason.LENGTH)])
        bodies.append(b"".join(format.whole(gathering.finish(1, 1))))

    assert bodies[0] == bodies[1]


def test_the_likeliest_choices_are_returned_prompt_by_prompt():
    gathering = Gathering(6, completion_format(n=1, best_of=3).encode_logprobs)
    means = [-3.0, -1.0, -2.0, -0.5, -0.1, -0.2]
    for index, mean in enumerate(means):
        scores = [TokenLogprobs(mean - 0.05), TokenLogprobs(mean + 0.05)]
        gathering.add([ChoiceDelta(index, str(index), [300, 300], scores, FinishReason.LENGTH)])

    returned = gathering.finish(3, 2)

    assert [(choice.delta.index, choice.delta.text) for choice in returned] == [(0, "1"), (1, "2"), (2, "4"), (3, "5")]


def test_a_failed_choice_is_returned_only_if_others_are_too_few():
    gathering = Gathering(3, completion_format(n=1, best_of=3).encode_logprobs)
    for index, mean in enumerate((-0.1, -2.0, -3.0)):
        delta = ChoiceDelta(index, str(index), [300], [TokenLogprobs(mean)], FinishReason.STOP)
        if not index:
            delta.finish, delta.error = FinishReason.ERROR, NothingAllowed()
        gathering.add([delta])

    assert [choice.delta.text for choice in gathering.finish(3, 2)] == ["1", "2"]
