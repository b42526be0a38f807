"""The model served, once it is loaded: names, limits, tokenizer, template, sampling defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from infd.errors import CheckpointError, ModelNotFound
from infd.text.syntax import Syntax

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from infd.text.chat import ChatTemplate
    from infd.text.tokenizer import Tokenizer


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Sampling parameters that a request leaves out: those of the model's generation_config.json.

    Their max_new_tokens does not count: how long an answer may be is the request's to say, and the context's.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0

    @classmethod
    def read(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Read generation_config.json. Raises CheckpointError."""
        given = {name: value for name, value in generation_config.items() if value is not None}
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"generation_config.json: {error}") from error


class ServedModel(Struct, frozen=True, kw_only=True):
    """The model served: its names, its limits, its tokenizer and template.

    names          what clients may call it; the first is reported
    created        Unix time, seconds
    max_model_len  prompt and answer together, tokens
    vocab_size     token ids are 0..vocab_size - 1
    syntax         of the thoughts and tool calls in its answers
    adapters       names of the adapters loaded now, which requests may name in place of the model
    """

    names: tuple[str, ...]
    created: int
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    template: ChatTemplate
    syntax: Syntax = Syntax()
    defaults: SamplingDefaults = SamplingDefaults()
    adapters: Collection[str] = ()

    def name(self, asked: str | None) -> str:
        """Return the name to answer with; without a name, the base model's. Raises ModelNotFound."""
        if not asked:
            return self.names[0]
        if asked not in self.names and asked not in self.adapters:
            raise ModelNotFound(asked, (*self.names, *self.adapters))
        return asked

    def adapter(self, asked: str | None) -> str | None:
        """Return the adapter of this name; None if it is the model's own. Raises ModelNotFound."""
        name = self.name(asked)
        return None if name in self.names else name
