"""A request before its prompt is written: text, or the lengths and seeds of random text."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class DatasetError(Exception):
    """A dataset cannot be read; the message names the file, the line and what was expected."""


class Block(Struct, frozen=True):
    """Random text of a length; equal seeds give equal texts."""

    seed: str
    tokens: int


class Outline(Struct, frozen=True):
    """A prompt of random blocks. Prompts that begin with equal blocks share these as a prefix."""

    blocks: tuple[Block, ...]

    @property
    def tokens(self) -> int:
        return sum(block.tokens for block in self.blocks)


class Call(Struct, frozen=True, kw_only=True):
    """One request of a dataset.

    prompt         a text, messages, or the outline of a random text; None: `body` has the prompt
    output_tokens  most to generate; None: as many as `reply` has, or as `body` says
    reply          a recorded answer, whose length is that of the answer to generate
    at_s           time in a trace
    body           a request body, which the settings' model, sampling and extra fields are merged into
    endpoint       of the body; None: the settings'
    """

    prompt: str | list[dict[str, Any]] | Outline | None = None
    output_tokens: int | None = None
    reply: str = ""
    at_s: float | None = None
    body: dict[str, Any] = {}
    endpoint: Literal["chat", "completions"] | None = None
