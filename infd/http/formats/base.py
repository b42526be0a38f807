"""What all formats share: the frame around a streamed text, what a request cost, and tokens as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import UNSET

from infd.http.pieces import array, batched, elements
from infd.http.schema.logprobs import PromptLogprob
from infd.http.schema.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from infd.http.sse import event

if TYPE_CHECKING:
    from msgspec import Struct

    from infd.engine.admission.ticket import Ticket
    from infd.http.answer import Opening, Part
    from infd.http.pieces import Pieces
    from infd.request import TokenLogprobs
    from infd.text.tokenizer import Tokenizer

# Stands for the text in a chunk that is cut in two around it. Encoded, it is b'"\\u0000"', which nothing else contains.
PLACE: Final = "\0"

# JSON has no infinity.
LOWEST_LOGPROB: Final = -9999.0

# Tokens that are explained in one piece: with 20 alternatives each, about 30 KB in half a millisecond.
PIECE_TOKENS: Final = 16
# Of one token among a prompt's log-probabilities, at most, where its text is no longer than 47 bytes: 43 of names and
# marks, 7 of its id, 24 of a float, 7 of a rank. An echo's are shorter.
ENTRY_BYTES: Final = 128


class Format(Protocol):
    """One answer, in the words of one API."""

    def events(self, part: Part) -> Pieces:
        """Return the framed events of what is new in one choice; none if it shows nothing yet."""

    def closing_events(self) -> bytes:
        """Return what follows the last part, before the mark that ends the stream."""

    def whole(self, parts: list[Part]) -> Pieces:
        """Return the body of an answer that is not streamed."""


def framed(data: Pieces) -> Pieces:
    """Frame one event."""
    return [b"data: ", *data, b"\n\n"]


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


def explain_prompt(opening: Opening, most: int, tokenizer: Tokenizer) -> Pieces:
    """Return the JSON of how likely each token of a prompt was, with the `most` likely ones in its place."""
    tokens = zip(opening.token_ids, opening.logprobs, strict=True)
    return array(elements(batched((_explained(*token, most, tokenizer) for token in tokens), PIECE_TOKENS)))


def _explained(
    token_id: int, logprobs: TokenLogprobs | None, most: int, tokenizer: Tokenizer
) -> dict[int, PromptLogprob] | None:
    if logprobs is None:
        return None
    told = {token_id: (logprobs.chosen, logprobs.rank or 0)}
    for rank, (top_id, logprob) in enumerate(zip(logprobs.top_ids[:most], logprobs.top, strict=False), 1):
        told.setdefault(top_id, (logprob, rank))
    return {
        each: PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=readable(tokenizer.piece(each)))
        for each, (logprob, rank) in told.items()
    }


def readable(piece: bytes) -> str:
    """Return a token's bytes as text; a token may end inside a character."""
    return piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
