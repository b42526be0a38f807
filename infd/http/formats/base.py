"""What all formats share: the frame around a streamed text, what a request cost, and tokens as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import UNSET

from infd.http.schema.logprobs import PromptLogprob
from infd.http.schema.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from infd.http.sse import event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Struct

    from infd.engine.ticket import Ticket
    from infd.http.answer import Part
    from infd.http.schema.logprobs import PromptLogprobs
    from infd.request import TokenLogprobs
    from infd.text.tokenizer import Tokenizer

# Stands for the text in a chunk that is cut in two around it. Encoded, it is b'"\\u0000"', which nothing else contains.
PLACE: Final = "\0"

# JSON has no infinity.
LOWEST_LOGPROB: Final = -9999.0


class Format(Protocol):
    """One answer, in the words of one API."""

    def events(self, parts: list[Part]) -> bytes:
        """Return the framed events of what is new; none if it shows nothing yet."""

    def closing_events(self) -> bytes:
        """Return what follows the last part, before the mark that ends the stream."""

    def whole(self, parts: list[Part]) -> bytes:
        """Return the body of an answer that is not streamed."""


def around(chunk: Struct) -> list[bytes]:
    """Return the bytes around the text in a framed chunk whose text is PLACE, wherever it stands.

    Encoding a chunk takes longer than all else that is done for a token; only its text changes.
    """
    return event(msgspec.json.encode(chunk)).split(msgspec.json.encode(PLACE))


def usage(ticket: Ticket, thought_tokens: int = 0) -> Usage:
    """Return what the request has cost so far, its thinking too if there was any."""
    return Usage(
        prompt_tokens=ticket.prompt_tokens,
        completion_tokens=ticket.generated_tokens,
        total_tokens=ticket.prompt_tokens + ticket.generated_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=ticket.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=thought_tokens) if thought_tokens else UNSET,
    )


def explain_prompt(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], most: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """Return how likely each token of a prompt was, with the `most` likely ones in its place."""
    explained: PromptLogprobs = []
    for token_id, each in zip(token_ids, logprobs, strict=True):
        if each is None:
            explained.append(None)
            continue
        told = {token_id: (each.chosen, each.rank or 0)}
        for rank, (top_id, logprob) in enumerate(zip(each.top_ids[:most], each.top, strict=False), 1):
            told.setdefault(top_id, (logprob, rank))
        explained.append(
            {
                token_id: PromptLogprob(
                    logprob=finite(logprob), rank=rank, decoded_token=readable(tokenizer.piece(token_id))
                )
                for token_id, (logprob, rank) in told.items()
            }
        )
    return explained


def readable(piece: bytes) -> str:
    """Return a token's bytes as text; a token may end inside a character."""
    return piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
