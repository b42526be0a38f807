"""Log-probabilities of a prompt, in vLLM's format."""

from __future__ import annotations

from msgspec import Struct


class PromptLogprob(Struct, kw_only=True):
    """One token at one position of the prompt; `rank` 1 is the likeliest there."""

    logprob: float
    rank: int
    decoded_token: str


# One entry per position: the prompt's own token, then the likeliest ones, by id. The first position has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]
