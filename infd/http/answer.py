"""The answer to one request as it grows: token ids become text, choice by choice.

Streamed or gathered, every answer is read through here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import RequestFailed
from infd.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from infd.engine.stream import Choices, Delta
    from infd.request import TokenLogprobs
    from infd.text.reply import Reply


class Part(Struct):
    """What is new in one choice.

    stop_reason  the stop string, or the id among those the request named, that finished it
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish: FinishReason | None = None
    stop_reason: str | int | None = None


class Answer:
    """Iterate to get all parts that have come since the last look; raises what ended a choice in an error.

    stop_ids      end ids that the request named itself
    show_stop_id  whether such an id's text belongs to the answer
    """

    def __init__(
        self, choices: Choices, replies: Sequence[Reply], *, stop_ids: Collection[int], show_stop_id: bool
    ) -> None:
        self._choices = choices
        self._replies = replies
        self._stop_ids = stop_ids
        self._show_stop_id = show_stop_id

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> list[Part]:
        choices = self._choices
        parts = [self._part(*await choices.__anext__())]
        while choices.ready:
            parts.append(self._part(*choices.take()))
        return parts

    async def gather(self) -> list[Part]:
        """Return every choice whole, in order of index."""
        pieces: list[list[Part]] = [[] for _ in self._replies]
        async for parts in self:
            for part in parts:
                pieces[part.index].append(part)
        return [_joined(parts) for parts in pieces]

    def _part(self, index: int, delta: Delta) -> Part:
        reply = self._replies[index]
        if delta.finish is None:
            return Part(index, reply.take(), delta.token_ids, delta.logprobs)
        if delta.finish is FinishReason.ERROR:
            raise delta.error or RequestFailed("the engine gave no reason")
        stop_id = delta.stop_id if delta.stop_id in self._stop_ids else None
        if stop_id is not None and self._show_stop_id:
            reply.feed([stop_id])
        text = reply.finish()
        if reply.stop_reason is not None:  # the last bytes may complete a stop string after the engine ended it
            return Part(index, text, delta.token_ids, delta.logprobs, FinishReason.STOP, reply.stop_reason)
        return Part(index, text, delta.token_ids, delta.logprobs, delta.finish, stop_id)


def _joined(parts: list[Part]) -> Part:
    last = parts[-1]
    return Part(
        last.index,
        "".join(part.text for part in parts),
        [token_id for part in parts for token_id in part.token_ids],
        [logprobs for part in parts for logprobs in part.logprobs],
        last.finish,
        last.stop_reason,
    )
