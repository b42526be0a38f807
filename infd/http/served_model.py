"""The served model after loading: names, limits, tokenizer, template, sampling defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Struct

from infd.errors import CheckpointError, ModelNotFound
from infd.text.syntax import Syntax

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infd.text.chat import ChatTemplate
    from infd.text.infill import Infill
    from infd.text.tokenizer import Tokenizer


class SamplingDefaults(Struct, frozen=True, kw_only=True):
    """Defaults for sampling parameters that a request omits, from the model's generation_config.json.

    max_new_tokens is ignored: as in OpenAI's API, only the request and the context length limit an answer.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0

    @classmethod
    def read(cls, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Convert the content of generation_config.json; null means absent. Raises CheckpointError."""
        given = {name: value for name, value in generation_config.items() if value is not None}
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"generation_config.json: {error}") from error


class Adapters(Protocol):
    """The directories of the loaded adapters, by name."""

    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, name: str) -> str: ...


class ServedModel(Struct, frozen=True, kw_only=True):
    """The served model: its names, limits, tokenizer and template.

    names          names that requests may send as `model`; the first is the default
    created        time at which the model was loaded, in seconds of Unix time
    max_model_len  context length: tokens of prompt and answer together
    vocab_size     token ids are 0..vocab_size - 1
    syntax         markup of thoughts and tool calls in the model's answers
    adapters       directories of the loaded adapters by name; requests may use these names too
    fingerprint    changes with the weights and with infd's version
    infill         writer of prompts with gaps; None: the vocabulary has no tokens for filling in the middle
    """

    names: tuple[str, ...]
    created: int
    max_model_len: int
    vocab_size: int
    tokenizer: Tokenizer
    template: ChatTemplate
    syntax: Syntax = Syntax()
    defaults: SamplingDefaults = SamplingDefaults()
    adapters: Adapters = {}
    fingerprint: str = ""
    infill: Infill | None = None

    def name(self, requested: str | None) -> str:
        """Return the model name that answers report: `requested`, or if empty the first name. Raises ModelNotFound."""
        if not requested:
            return self.names[0]
        if requested not in self.names and requested not in self.adapters:
            raise ModelNotFound(requested, (*self.names, *self.adapters))
        return requested

    def adapter(self, requested: str | None) -> str | None:
        """Return the adapter named `requested`; None if `requested` names the base model. Raises ModelNotFound."""
        name = self.name(requested)
        return None if name in self.names else name
