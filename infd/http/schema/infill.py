"""llama.cpp's POST /infill."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from infd.http.schema.openai import OpenAIRequest
from infd.http.schema.usage import Timings

FILES = 256


class ExtraFile(Struct, kw_only=True):
    """Another file that the model reads."""

    text: str
    filename: str = "tmp"


class InfillRequest(OpenAIRequest, kw_only=True):
    """The body of a request to fill a gap between two texts. The answer continues `prompt`, the gap's first part."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Meta(max_length=FILES)] | None = None
    prompt: str | None = None


class InfillAnswer(Struct, kw_only=True):
    """A whole answer, or the last event of a streamed one, whose `content` is empty.

    stop_type      why the answer ended: at an end token or a stop string, or at its limit
    stopping_word  the stop string
    """

    index: int = 0
    content: str
    tokens: list[int] = []
    id_slot: int = -1
    stop: Literal[True] = True
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool = False
    stop_type: Literal["eos", "limit", "word", "none"]
    stopping_word: str
    timings: Timings | UnsetType = UNSET


class InfillChunk(Struct, kw_only=True):
    """The new part of a streamed answer."""

    index: int = 0
    content: str
    tokens: list[int]
    id_slot: int = -1
    stop: Literal[False] = False
    tokens_predicted: int
    tokens_evaluated: int
