"""Random requests of given lengths."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from infd.loadgen.datasets.call import Block, Call, Outline

if TYPE_CHECKING:
    from infd.loadgen.datasets.spec import Synthetic


def calls(spec: Synthetic, count: int, seed: int | str) -> list[Call]:
    """Return `count` requests; equal seeds give equal requests, of which each has a text of its own."""
    rng = random.Random(f"lengths {seed}")  # noqa: S311 - reproducible, not secret
    made = []
    for number in range(count):
        tokens = _length(rng, spec.input_tokens, spec.input_range)
        # The prefix has one length, so that prompts of other lengths share it too; each prompt has a token of its own.
        shared = min(round(spec.input_tokens * spec.shared), tokens - 1)
        own = Block(f"{seed} own {number}", tokens - shared)
        prefix = (Block(f"{seed} prefix {number % spec.prefixes}", shared),) if shared > 0 else ()
        output = _length(rng, spec.output_tokens, spec.output_range)
        made.append(Call(prompt=Outline((*prefix, own)), output_tokens=output))
    return made


def _length(rng: random.Random, tokens: int, spread: float) -> int:
    low, high = math.floor(tokens * (1 - spread)), math.ceil(tokens * (1 + spread))
    return max(1, rng.randint(low, high))
