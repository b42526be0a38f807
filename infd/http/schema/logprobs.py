"""How likely a prompt's tokens are, as vLLM's clients read it."""

from __future__ import annotations

from msgspec import Struct


class PromptLogprob(Struct, kw_only=True):
    """A token in one place of the prompt; `rank` 1 is the most likely one there."""

    logprob: float
    rank: int
    decoded_token: str


# One entry per token, by id: the prompt's own, then the most likely ones. Nothing comes before the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]
