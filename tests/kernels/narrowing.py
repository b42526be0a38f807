"""Rows of logits with limits of llama.cpp's samplers, for the tests of each implementation."""

from __future__ import annotations

import torch

from infd.kernels.families.draw import Narrowing

NEUTRAL = {
    "temperature": 1.0,
    "late": 1.0,
    "top_n_sigma": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "range": 0.0,
    "exponent": 1.0,
}

CASES = {
    "nothing": {},
    "sigma": {"top_n_sigma": 1.5},
    "typical": {"typical_p": 0.7},
    "xtc": {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    "xtc of the half": {"xtc_probability": 0.5, "xtc_threshold": 0.02, "top_k": 30},
    "xtc above the half": {"xtc_probability": 1.0, "xtc_threshold": 0.6},
    "dynamic": {"temperature": 1.2, "range": 0.9},
    "dynamic to zero": {"temperature": 0.5, "range": 0.9, "exponent": 2.0, "top_k": 40},
    "dynamic of one": {"temperature": 0.5, "range": 0.2, "top_k": 1},
    "chain": {
        "top_n_sigma": 3.0,
        "top_k": 60,
        "typical_p": 0.9,
        "top_p": 0.9,
        "min_p": 0.05,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.08,
        "temperature": 0.7,
        "range": 0.3,
        "exponent": 1.3,
    },
    "late": {"top_k": 40, "top_p": 0.9, "min_p": 0.1, "temperature": 1.6},
    "early": {"late": 0.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.6},
    "early, all": {"late": 0.0, "top_n_sigma": 2.0, "typical_p": 0.8, "min_p": 0.01, "temperature": 0.5, "top_p": 0.99},
}


def logits_of(rows: int, vocab: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(rows + vocab)) * scale


def narrowing_of(logits: torch.Tensor, asked: list[dict[str, float]], rows: list[int] | None = None) -> Narrowing:
    """Return the parameters of some rows, all if not told which."""
    index = torch.arange(len(logits)) if rows is None else torch.tensor(rows)
    columns = {
        name: torch.tensor([{**NEUTRAL, **each}[name] for each in asked], dtype=torch.float32) for name in NEUTRAL
    }
    columns["late"] = columns["late"] != 0
    columns["top_k"] = columns["top_k"].to(torch.int32)
    seeds = torch.randint(-(2**31), 2**31, (len(index), 2), generator=torch.Generator().manual_seed(5))
    return Narrowing(
        rows=index,
        largest=logits[index].amax(-1),
        seed=seeds.to(torch.int32),
        position=torch.arange(len(index), dtype=torch.int32) * 1000,
        **columns,
    )


def different(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Return the largest number of tokens that a row of one keeps and of the other drops.

    Where a mass equals a limit within rounding, one token more or less is right.
    """
    return int(((found > -torch.inf) != (expected > -torch.inf)).sum(-1).max())
