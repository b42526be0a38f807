"""The words that all rooms share: what a caller asks for, and how one choice of it ends."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from msgspec import Struct


class FinishReason(Enum):
    """How a choice ended. The values are what OpenAI clients read."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How the next token is chosen from the logits. Every value is already checked."""

    max_tokens: int  # 0: only look at the prompt
    min_tokens: int = 0  # end ids and stop strings are ignored until this many tokens are generated
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that are not to be generated
    seed: int = 0  # of the noise; a choice adds its index
    logprobs: int | None = None  # None: not asked; 0: of the chosen token; k: also of the k most likely
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, all but the first


class Request(Struct, frozen=True, kw_only=True):
    """One prompt and what is wanted of it."""

    id: str  # unique in this process
    prompt: tuple[int, ...]
    sampling: SamplingParams
    choices: int = 1
    end_ids: frozenset[int] = frozenset()  # a generated one finishes the choice with "stop"
    priority: int = 0  # lower is earlier
    adapter: str | None = None  # by name; None: the model itself
    tenant: str = ""  # prefix pages are shared within a tenant only
    cache_salt: str = ""  # narrows the sharing further


class Adapter(Struct, frozen=True):
    """A change to the model, as its files were when they were loaded. The executor holds its weights.

    generation  unique; each load of an adapter, under any name, is another generation
    """

    name: str
    generation: int
    path: str = ""

    def __repr__(self) -> str:
        return f"<Adapter {self.name}/{self.generation}>"


class AdapterFacts(Struct, frozen=True):
    """An adapter that an executor has read.

    base   the model that its config names
    rank   the largest of its products
    bytes  of host memory that it takes
    stamp  differs once its files have changed
    """

    base: str
    rank: int
    bytes: int
    stamp: tuple[tuple[int, ...], ...]


class TokenLogprobs(Struct, frozen=True):
    """Log-probabilities at one position, from the raw logits (before temperature, penalties and bias)."""

    chosen: float  # of the token that stands there
    top_ids: tuple[int, ...] = ()  # most likely first
    top: tuple[float, ...] = ()
    rank: int | None = None  # 1: no other is likelier; told of prompt tokens only
