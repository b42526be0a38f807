"""The sources of a run's requests."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Shape = Literal["sharegpt", "batch", "prompts", "mooncake", "burstgpt"]

DEFAULT_OUTPUT_TOKENS: Final = 128

TRACES: Final = ("mooncake", "burstgpt")
"""Shapes whose records have times and lengths, and no text."""


class Synthetic(Struct, frozen=True, kw_only=True, tag="synthetic"):
    """Random prompts.

    *_range   lengths are uniform in [floor(tokens (1 - range)), ceil(tokens (1 + range))], and at least 1
    shared    fraction of each prompt that is a prefix of other prompts too
    prefixes  number of prefixes, each shared by as many prompts
    """

    input_tokens: Annotated[int, Meta(ge=1)] = 128
    output_tokens: Annotated[int, Meta(ge=1)] = DEFAULT_OUTPUT_TOKENS
    input_range: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    output_range: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    shared: Annotated[float, Meta(ge=0, le=1)] = 0.0
    prefixes: Annotated[int, Meta(ge=1)] = 1


class File(Struct, frozen=True, kw_only=True, tag="file"):
    """The requests of a file.

    shape          of its records
    output_tokens  of each request; None: as the record says, or as long as its recorded reply, or 128
    time_scale     factor of a trace's times: 0.5 sends the requests twice as fast
    shuffle        whether records of conversations and prompts are drawn in random order
    """

    path: str
    shape: Shape
    output_tokens: Annotated[int, Meta(ge=1)] | None = None
    time_scale: Annotated[float, Meta(gt=0)] = 1.0
    shuffle: bool = True
