"""Conversations, batches and prompts of JSON and JSONL files, one reader a shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from infd.loadgen.datasets.call import Block, Call, DatasetError, Outline

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.loadgen.datasets.spec import Shape

R = TypeVar("R", bound=Struct)

MOONCAKE_BLOCK_TOKENS: Final = 512
"""Tokens that one of a Mooncake trace's hashes stands for. Source: the trace's README."""


class _Turn(Struct):
    speaker: str = field(name="from", default="")
    value: str = ""


class _Conversation(Struct):
    conversations: list[_Turn]


class _Batch(Struct):
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]


class _Prompt(Struct):
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    output_tokens: Annotated[int, Meta(ge=1)] | None = None


class _Mooncake(Struct):
    timestamp: float  # milliseconds
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=1)]
    hash_ids: list[int] = []


def sharegpt(record: Any) -> Call | None:
    """Read {"conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}]}: its first turn and reply."""
    turns = _as(record, _Conversation).conversations
    if len(turns) < 2 or not turns[0].value or not turns[1].value:
        return None
    return Call(prompt=turns[0].value, reply=turns[1].value)


def batch(record: Any) -> Call | None:
    """Read a line of an OpenAI batch file."""
    line = _as(record, _Batch)
    return Call(body=line.body, endpoint="chat" if line.url.endswith("/chat/completions") else "completions")


def prompts(record: Any) -> Call | None:
    """Read a text, or {"prompt": ...} or {"messages": [...]}, with "output_tokens" if it is known."""
    if isinstance(record, str):
        return Call(prompt=record) if record.strip() else None
    line = _as(record, _Prompt)
    given = line.messages if line.prompt is None else line.prompt
    if given is None:
        raise msgspec.ValidationError("Object has neither `prompt` nor `messages`")
    return Call(prompt=given, output_tokens=line.output_tokens)


def mooncake(record: Any) -> Call | None:
    """Read {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [blocks of 512 tokens]}."""
    line = _as(record, _Mooncake)
    blocks, left = [], line.input_length
    for name in line.hash_ids:
        blocks.append(Block(f"hash {name}", min(left, MOONCAKE_BLOCK_TOKENS)))
        left -= blocks[-1].tokens
        if not left:
            break
    if left:
        blocks.append(Block(f"rest {line.timestamp} {line.hash_ids[-1:]}", left))
    return Call(prompt=Outline(tuple(blocks)), output_tokens=line.output_length, at_s=line.timestamp / 1000)


READERS: Final[dict[Shape, Callable[[Any], Call | None]]] = {
    "sharegpt": sharegpt,
    "batch": batch,
    "prompts": prompts,
    "mooncake": mooncake,
}
"""Readers of a record: None leaves the record out, such as a conversation without a reply."""


def recognize(record: Any, where: str) -> Shape:
    """Return the shape of a file's first record. Raises DatasetError."""
    keys = set(record) if isinstance(record, dict) else set()
    if isinstance(record, str) or keys & {"prompt", "messages"}:
        return "prompts"
    for key, shape in _KEYS.items():
        if key in keys:
            return shape
    raise DatasetError(
        f"{where}: neither a conversation (conversations), nor a batch's line (body), nor a prompt (prompt, messages),"
        " nor a trace's (input_length)"
    )


_KEYS: Final[dict[str, Shape]] = {"conversations": "sharegpt", "body": "batch", "input_length": "mooncake"}


def _as(record: Any, kind: type[R]) -> R:
    return msgspec.convert(record, kind)
