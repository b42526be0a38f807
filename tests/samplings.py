"""Sampling parameters that together set every field, for tests that two ways to generate give equal answers."""

from __future__ import annotations

from array import array
from itertools import product
from typing import TYPE_CHECKING, Any

from infd.request import Breakers, Chain, Dry, Generate, Mirostat, Request, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

# Token 8 is a breaker, and the token 9 after a 5.
BREAKERS = Breakers(heads=(array("i", [8]).tobytes(), array("i", [5]).tobytes()), tails=((9,),))
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "limits": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.5},
    "answer penalties": {"temperature": 0.5, "presence_penalty": 1.5, "frequency_penalty": 2.0},
    "all penalties": {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logit_bias": {3: 4.0},
    },
    "bias": {"temperature": 0.9, "logit_bias": {8: -100.0, **dict.fromkeys(range(20, 40), 4.0)}},
    "min_tokens": {"temperature": 2.0, "min_tokens": 7},
    "words": {"temperature": 1.0, "bad_words": ((8,), (5, 6, 7), *product(range(30, 60), range(60, 90)))},
    "allowed": {"temperature": 1.0, "allowed_token_ids": tuple(range(20, 50))},
    "all masks": {
        "temperature": 0.5,
        "min_tokens": 5,
        "bad_words": ((5, 9), (8,)),
        "allowed_token_ids": tuple(range(50)),
    },
    "logprobs": {"temperature": 1.0, "logprobs": 3},
    "listed logprobs": {"temperature": 1.0, "logprobs": 0, "logprob_ids": (4, 90, 7)},
    "processed logprobs": {
        "temperature": 0.7,
        "logprobs": 3,
        "logprobs_mode": "processed_logprobs",
        "frequency_penalty": 0.9,
    },
    "processed logits": {"temperature": 0.7, "logprobs": 3, "logprobs_mode": "processed_logits", "top_k": 40},
    "raw logits": {"temperature": 1.0, "logprobs": 3, "logprobs_mode": "raw_logits"},
    "dry": {"temperature": 0.0, "dry": Dry(2.0, 1.75, 1, None, Breakers())},
    "dry within a window, with breakers": {"temperature": 0.2, "dry": Dry(4.0, 1.2, 1, 10, BREAKERS)},
    "sigma": {"temperature": 2.0, "chain": Chain(top_n_sigma=0.3)},
    "typical": {"temperature": 1.2, "chain": Chain(typical_p=0.6)},
    "xtc": {"temperature": 1.0, "chain": Chain(xtc_probability=0.6, xtc_threshold=0.002)},
    "dynamic temperature": {"temperature": 1.0, "chain": Chain(dynatemp_range=0.7, dynatemp_exponent=1.5)},
    "whole chain": {
        "temperature": 1.1,
        "top_k": 60,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "dry": Dry(0.8, 1.75, 1, 20, BREAKERS),
        "chain": Chain(3.0, 0.95, 0.5, 0.01, 0.3, 0.8),
    },
    "mirostat": {"temperature": 1.0, "mirostat": Mirostat(1, 0.7, 0.3)},
    "mirostat 2": {"temperature": 1.0, "mirostat": Mirostat(2, 2.0, 0.3), "frequency_penalty": 0.5},
}
END_IDS = frozenset(range(2, 100, 2))  # of the requests with min_tokens


def sampled(name: str, prompt: Sequence[int], *, max_tokens: int, seed: int, **fields: Any) -> Request:
    """Return a request with the parameters of this name; other `fields` replace them."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed, **{**SAMPLING[name], **fields})
    wants = (Generate(params, END_IDS if params.min_tokens else frozenset()),)
    return Request(id=str(seed), prompt=tuple(prompt), wants=wants)
