"""Messages survive any fragmentation of a stream; none exceeds the limit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infd import frames


@given(st.lists(st.binary() | st.integers(0, 9)), st.lists(st.integers(0, 10**4)))
def test_messages_arrive_however_the_stream_is_cut(messages: list[object], cuts: list[int]):
    stream = b"".join(frames.frame(message) for message in messages)
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    reader = frames.Reader(bytes | int)

    received = [m for begin, end in pairwise(edges) for m in reader.feed(stream[begin:end])]

    assert received == messages


def test_a_message_that_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(frames, "LARGEST", 4)

    assert frames.frame("abc")
    with pytest.raises(frames.FrameTooLarge, match="5 bytes; at most 4"):
        frames.frame("abcd")


def test_the_length_of_a_message_is_not_believed_beyond_the_limit():
    with pytest.raises(frames.FrameTooLarge):
        list(frames.Reader(bytes).feed(b"\xff\xff\xff\xff"))
