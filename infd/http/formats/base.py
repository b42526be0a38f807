"""The interface of formats, and functions that formats share: they frame events, count usage and decode tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import UNSET, Struct

from infd.http.pieces import PIECE_TOKENS, batched, elements
from infd.http.schema.logprobs import PromptLogprob, TokenLogprob, TopLogprob
from infd.http.schema.usage import CompletionTokensDetails, PromptTokensDetails, Usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.engine.admission.ticket import Ticket
    from infd.errors import RequestError
    from infd.http.answer import ChoiceDelta, PromptReport
    from infd.http.gathering import WholeChoice
    from infd.http.pieces import Pieces
    from infd.http.rates import Standing
    from infd.request import TokenLogprobs
    from infd.text.tokenizer import Tokenizer

# Placeholder for the text of a chunk. The encoded chunk is split at the encoded placeholder, b'"\\u0000"', which occurs
# nowhere else in the chunk.
TEXT_PLACEHOLDER: Final = "\0"

# Returns the name of a token in log-probabilities, given the token's id and bytes.
TokenName = Callable[[int, bytes], str]

# Replaces negative infinity, which JSON cannot represent.
LOWEST_LOGPROB: Final = -9999.0

# Maximum bytes of one token's entry in prompt_logprobs, if the token's text is no longer than 47 bytes: 43 of names and
# punctuation, 7 of the id, 24 of a float, 7 of a rank. A token's entry in the logprobs of an echo is shorter.
ENTRY_BYTES: Final = 128


class Accepted(Struct, frozen=True):
    """The properties of a queued generation that its format reports.

    model           model name that the answer reports
    prompts         token ids of each prompt
    marked_up       whether thoughts or tool calls are parsed out of the answers; content may then be missing
    fingerprint     changes with the weights and with infd's version
    context_tokens  the model's context length
    """

    ticket: Ticket
    model: str
    tokenizer: Tokenizer
    prompts: Sequence[tuple[int, ...]]
    marked_up: bool = False
    fingerprint: str = ""
    context_tokens: int = 0


class Errors(Protocol):
    """The format of an API's errors.

    request_id_header  response header from which the API's clients read the request id; X-Request-Id is sent too
    """

    request_id_header: str

    def error_body(self, error: RequestError) -> bytes:
        """Return the body of an error response."""

    def rate_headers(self, standings: Sequence[Standing]) -> dict[str, str]:
        """Return the response headers that report rate limits, as the API's clients read them."""

    def error_events(self, error: RequestError) -> bytes:
        """Return the framed events that report an error and end the stream, the API's end marker included."""


class Format(Errors, Protocol):
    """The encoder of one answer: `events` and `last_events` for a streamed answer, `whole` for any other.

    folds  whether an answer that is not streamed passes through `events` too, as it is generated, before `whole`
    """

    folds: bool

    def events(self, delta: ChoiceDelta) -> Pieces:
        """Return the framed events of a delta; an empty list if the delta changes nothing visible."""

    def last_events(self) -> bytes:
        """Return the framed events that follow the last delta, the API's end marker included.

        Empty if the request's answer goes on with another of the model's answers.
        """

    def encode_logprobs(self, delta: ChoiceDelta) -> dict[str, Pieces]:
        """Return the log-probabilities of a delta and of its prompt report, as encoded elements of JSON arrays by name.

        The caller passes every token once, in order.
        """

    def whole(self, choices: Sequence[WholeChoice]) -> Pieces:
        """Return the body of an answer that is not streamed. With `folds`, `choices` is empty."""


def event(data: bytes) -> bytes:
    """Frame one event. `data` must not contain a newline; encoded JSON contains none."""
    return b"data: " + data + b"\n\n"


def named_event(kind: str, data: bytes) -> bytes:
    """Frame one event with its name; see `event`."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def framed(data: Pieces) -> Pieces:
    """Frame one event given in pieces."""
    return [b"data: ", *data, b"\n\n"]


def split_chunk(chunk: Struct) -> list[bytes]:
    """Return a framed chunk, split at every TEXT_PLACEHOLDER in `chunk`; callers join the parts with the text.

    Only the text of a chunk changes from token to token, and encoding a whole chunk takes longer than all other work
    on a token.
    """
    return event(msgspec.json.encode(chunk)).split(msgspec.json.encode(TEXT_PLACEHOLDER))


def usage(ticket: Ticket, thought_tokens: int = 0, unsent: int = 0, *, prediction: str | None = None) -> Usage:
    """Return the request's usage so far.

    thought_tokens  generated tokens in thoughts; 0: the usage omits the number
    unsent          delivered tokens that are not part of an event yet, and are not counted
    prediction      the request's prediction, whose drafted tokens are counted; None: the request has none
    """
    generated = ticket.generated_tokens - unsent
    details = CompletionTokensDetails(reasoning_tokens=thought_tokens)
    if prediction is not None:  # beside an empty one drafts come from elsewhere
        kept, drafted = (ticket.kept_drafts, ticket.drafted_tokens) if prediction else (0, 0)
        details.accepted_prediction_tokens, details.rejected_prediction_tokens = kept, drafted - kept
    return Usage(
        prompt_tokens=ticket.prompt_tokens,
        completion_tokens=generated,
        total_tokens=ticket.prompt_tokens + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=ticket.cached_tokens),
        completion_tokens_details=details if thought_tokens or prediction is not None else UNSET,
    )


def encode_prompt_logprobs(report: PromptReport, top: int, tokenizer: Tokenizer) -> Pieces:
    """Return the encoded elements of PromptLogprobs, with the `top` likeliest tokens of each position; -1: with all."""
    tokens = zip(report.token_ids, report.logprobs, strict=True)
    return elements(batched((_prompt_logprob_entries(*token, top, tokenizer) for token in tokens), PIECE_TOKENS))


def _prompt_logprob_entries(
    token_id: int, logprobs: TokenLogprobs | None, top: int, tokenizer: Tokenizer
) -> dict[int, PromptLogprob] | None:
    if logprobs is None:
        return None
    entries = {token_id: (logprobs.chosen, logprobs.rank or 0)}
    likeliest = logprobs.top_ids if top == -1 else logprobs.top_ids[:top]
    for rank, (top_id, logprob) in enumerate(zip(likeliest, logprobs.top, strict=False), 1):
        entries.setdefault(top_id, (logprob, rank))
    return {
        entry_id: PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=readable(tokenizer.piece(entry_id)))
        for entry_id, (logprob, rank) in entries.items()
    }


def token_logprobs(delta: ChoiceDelta, tokenizer: Tokenizer, name: TokenName) -> Iterator[TokenLogprob]:
    """Yield the log-probabilities of a delta's tokens, an entry for each token."""
    for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=False):
        pieces = map(tokenizer.piece, logprobs.top_ids)
        top = [
            TopLogprob(token=name(top_id, piece), logprob=finite(logprob), bytes=list(piece))
            for top_id, piece, logprob in zip(logprobs.top_ids, pieces, logprobs.top, strict=True)
        ]
        chosen = tokenizer.piece(token_id)
        yield TokenLogprob(
            token=name(token_id, chosen), logprob=finite(logprobs.chosen), bytes=list(chosen), top_logprobs=top
        )


def readable(piece: bytes) -> str:
    """Return a token's bytes as text. Incomplete characters become U+FFFD."""
    return piece.decode("utf-8", "replace")


def name_by_text(token_id: int, piece: bytes) -> str:
    return readable(piece)


def name_by_id(token_id: int, piece: bytes) -> str:
    return f"token_id:{token_id}"


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
