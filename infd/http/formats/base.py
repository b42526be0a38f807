"""What formats have in common: framed events, usage, and tokens as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import UNSET, Struct

from infd.http.pieces import PIECE_TOKENS, batched, elements
from infd.http.schema.logprobs import PromptLogprob
from infd.http.schema.usage import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.engine.admission.ticket import Ticket
    from infd.errors import RequestError
    from infd.http.answer import ChoiceDelta, PromptReport
    from infd.http.gathering import WholeChoice
    from infd.http.pieces import Pieces
    from infd.request import TokenLogprobs
    from infd.text.tokenizer import Tokenizer

# Marks the text in a chunk that is cut in two around it. Encoded, it is b'"\\u0000"', which nothing else contains.
PLACE: Final = "\0"

# JSON has no infinity.
LOWEST_LOGPROB: Final = -9999.0

# Bytes of one token among a prompt's log-probabilities, at most, if its text is no longer than 47 bytes: 43 of names
# and punctuation, 7 of its id, 24 of a float, 7 of a rank. An echo's are shorter.
ENTRY_BYTES: Final = 128


class Accepted(Struct, frozen=True):
    """What is known of a generation once it is queued.

    model      name to answer with
    prompts    token ids of each
    marked_up  whether thoughts or calls may be taken out of the answers, so that there may be no content
    """

    ticket: Ticket
    model: str
    tokenizer: Tokenizer
    prompts: Sequence[tuple[int, ...]]
    marked_up: bool = False


class Errors(Protocol):
    """How an API reports an error."""

    def error_body(self, error: RequestError) -> bytes:
        """Return the body of the response, if no event was sent."""

    def error_events(self, error: RequestError) -> bytes:
        """Return the framed events that end a stream, the API's last mark included."""


class Format(Errors, Protocol):
    """One answer in the words of one API: streamed by `events` and `last_events`, or `whole`."""

    def events(self, delta: ChoiceDelta) -> Pieces:
        """Return the framed events of a delta; none if it has nothing to show yet."""

    def last_events(self) -> bytes:
        """Return the framed events that follow the last delta, the API's last mark included."""

    def explain(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        """Return the log-probabilities of a delta, and those of its prompt if it repeats them: encoded elements of JSON
        arrays, by name. Called once for each token, in order.
        """

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        """Return the body of an answer that is not streamed."""


def event(data: bytes) -> bytes:
    """Frame one event. `data` holds no newline, as JSON does not."""
    return b"data: " + data + b"\n\n"


def framed(data: Pieces) -> Pieces:
    """Frame one event."""
    return [b"data: ", *data, b"\n\n"]


def around(chunk: Struct) -> list[bytes]:
    """Return the bytes of a framed chunk around its text, which is PLACE in one or more fields.

    Encoding a chunk takes longer than everything else done for a token, and only its text changes.
    """
    return event(msgspec.json.encode(chunk)).split(msgspec.json.encode(PLACE))


def usage(ticket: Ticket, thought_tokens: int = 0) -> Usage:
    """Return the tokens that the request has taken so far, those of thoughts too if there were any."""
    return Usage(
        prompt_tokens=ticket.prompt_tokens,
        completion_tokens=ticket.generated_tokens,
        total_tokens=ticket.prompt_tokens + ticket.generated_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=ticket.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=thought_tokens) if thought_tokens else UNSET,
    )


def explain_prompt(report: PromptReport, most: int, tokenizer: Tokenizer) -> Pieces:
    """Return the elements of PromptLogprobs, with the `most` likely tokens of each position."""
    tokens = zip(report.token_ids, report.logprobs, strict=True)
    return elements(batched((_explained(*token, most, tokenizer) for token in tokens), PIECE_TOKENS))


def _explained(
    token_id: int, logprobs: TokenLogprobs | None, most: int, tokenizer: Tokenizer
) -> dict[int, PromptLogprob] | None:
    if logprobs is None:
        return None
    entries = {token_id: (logprobs.chosen, logprobs.rank or 0)}
    for rank, (top_id, logprob) in enumerate(zip(logprobs.top_ids[:most], logprobs.top, strict=False), 1):
        entries.setdefault(top_id, (logprob, rank))
    return {
        each: PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=readable(tokenizer.piece(each)))
        for each, (logprob, rank) in entries.items()
    }


def readable(piece: bytes) -> str:
    """Return a token's bytes as text; a token may end inside a character."""
    return piece.decode("utf-8", "replace")


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
