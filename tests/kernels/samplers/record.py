"""Record what llama.cpp's samplers do, for tests.

`python tests/kernels/samplers/record.py LIBRARY > tests/kernels/samplers/llama.json` needs numpy and a shared library
with llama.cpp's samplers, such as libllama.so of llama-cpp-python 0.3.36, which recorded llama.json. DRY's breakers are
tokens, which the C interface does not take: the library must also export `dry_of_tokens`, a C function over
llama_sampler_init_dry_testing.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import numpy as np

VOCAB = 50
FLOAT, INT, SIZE, POINTER = ctypes.c_float, ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p
CHAINS: list[dict[str, float]] = [
    {"temperature": 0.7},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.0, "temperature": 1.5},
    {"typical_p": 0.9},
    {"typical_p": 0.3},
    {"top_p": 0.8, "min_p": 0.2},
    {"top_k": 7, "temperature": 0.4},
    {"xtc_threshold": 0.1, "xtc_probability": 1.0},
    {"xtc_threshold": 0.02, "xtc_probability": 1.0, "temperature": 2.0},
    {"xtc_threshold": 0.5, "xtc_probability": 1.0},
    {"range": 0.5, "temperature": 1.0},
    {"range": 1.5, "temperature": 1.0, "exponent": 0.5, "top_k": 20},
    {
        "top_n_sigma": 2.5,
        "top_k": 30,
        "typical_p": 0.95,
        "top_p": 0.9,
        "min_p": 0.02,
        "xtc_threshold": 0.1,
        "xtc_probability": 1.0,
        "temperature": 0.8,
        "range": 0.3,
        "exponent": 1.5,
    },
]
MIROSTATS = [(1, 3.0, 0.3), (1, 5.0, 0.1), (2, 3.0, 0.3), (2, 1.0, 0.5)]  # version, tau, eta


class Candidate(ctypes.Structure):
    _fields_ = (("id", INT), ("logit", FLOAT), ("p", FLOAT))


class Candidates(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(Candidate)),
        ("size", SIZE),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class Samplers:
    """llama.cpp's samplers, by name."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path, ctypes.RTLD_LAZY if hasattr(ctypes, "RTLD_LAZY") else 1)

    def make(self, name: str, *arguments: Any) -> Any:
        function = self._library[name]
        function.restype = POINTER
        return ctypes.c_void_p(function(*arguments))

    def apply(self, sampler: Any, logits: Any) -> tuple[dict[int, float], int]:
        """Return the kept tokens with their logits, and the selected token, -1 if none is."""
        data = (Candidate * len(logits))(*((i, logit, 0.0) for i, logit in enumerate(logits)))
        candidates = Candidates(data, len(logits), -1, False)
        self._library["llama_sampler_apply"](sampler, ctypes.byref(candidates))
        kept = {candidates.data[i].id: candidates.data[i].logit for i in range(candidates.size)}
        selected = candidates.data[candidates.selected].id if candidates.selected >= 0 else -1
        return {token: logit for token, logit in kept.items() if logit > -np.inf}, selected

    def accept(self, sampler: Any, token: int) -> None:
        self._library["llama_sampler_accept"](sampler, INT(token))


def logits_of(seed: int, scale: float = 2.0) -> list[float]:
    return [round(float(each), 3) for each in np.random.RandomState(seed).standard_normal(VOCAB) * scale]


def chained(samplers: Samplers, logits: list[float], asked: dict[str, float]) -> dict[int, float]:
    """Return the kept tokens of the samplers in the order of llama.cpp's chain."""
    given = {"top_n_sigma": 0, "top_k": 0, "typical_p": 1, "top_p": 1, "min_p": 0, "xtc_probability": 0, **asked}
    chain = [
        samplers.make("llama_sampler_init_top_n_sigma", FLOAT(given["top_n_sigma"])),
        samplers.make("llama_sampler_init_top_k", INT(int(given["top_k"]))),
        samplers.make("llama_sampler_init_typical", FLOAT(given["typical_p"]), SIZE(0)),
        samplers.make("llama_sampler_init_top_p", FLOAT(given["top_p"]), SIZE(0)),
        samplers.make("llama_sampler_init_min_p", FLOAT(given["min_p"]), SIZE(0)),
        samplers.make(
            "llama_sampler_init_xtc",
            *(FLOAT(given["xtc_probability"]), FLOAT(given.get("xtc_threshold", 0.1)), SIZE(0), ctypes.c_uint32(1)),
        ),
        samplers.make(
            "llama_sampler_init_temp_ext",
            *(FLOAT(given.get("temperature", 1)), FLOAT(given.get("range", 0)), FLOAT(given.get("exponent", 1))),
        ),
    ]
    left = dict(enumerate(logits))
    for sampler in chain:
        ids = list(left)
        kept, _ = samplers.apply(sampler, [left[token] for token in ids])
        left = {ids[place]: logit for place, logit in kept.items()}
    return left


def adapted(samplers: Samplers, version: int, tau: float, eta: float) -> list[dict[str, Any]]:
    """Return the steps of one sequence with mirostat: logits, kept tokens, selected token."""
    if version == 1:
        sampler = samplers.make(
            "llama_sampler_init_mirostat", INT(VOCAB), ctypes.c_uint32(7), FLOAT(tau), FLOAT(eta), INT(100)
        )
    else:
        sampler = samplers.make("llama_sampler_init_mirostat_v2", ctypes.c_uint32(7), FLOAT(tau), FLOAT(eta))
    steps = []
    for step in range(12):
        logits = logits_of(100 + step, scale=1.0 + step % 3)
        kept, selected = samplers.apply(sampler, logits)
        steps.append({"logits": logits, "kept": sorted(kept), "selected": selected})
    return steps


def repeated(samplers: Samplers, seed: int) -> dict[str, Any]:
    """Return a DRY penalty of a random sequence of few tokens."""
    chance = np.random.RandomState(seed)
    tokens = [int(each) for each in chance.randint(0, 4, chance.randint(3, 200))]
    if seed % 2:
        tokens = tokens[:20] + tokens[: chance.randint(1, 20)]
    settings = {
        "multiplier": [0.8, 2.0][seed % 2],
        "base": [1.75, 1.0, 1.2, 3.0][seed % 4],
        "allowed": [2, 0, 1, 4][seed // 4 % 4],
        "window": [64, 1000, 10][seed % 3],
    }
    breakers = [[], [[3]], [[2, 1]], [[3], [1, 2, 2], [1, 2], [0, 0, 0, 3]]][seed % 4]
    flat = [token for breaker in breakers for token in breaker]
    sampler = samplers.make(
        "dry_of_tokens",
        FLOAT(settings["multiplier"]),
        FLOAT(settings["base"]),
        INT(settings["allowed"]),
        INT(settings["window"]),
        (INT * max(1, len(flat)))(*flat),
        (INT * max(1, len(breakers)))(*map(len, breakers)),
        INT(len(breakers)),
    )
    for token in tokens:
        samplers.accept(sampler, token)
    found, _ = samplers.apply(sampler, [0.0] * 6)
    penalties = [-found.get(token, -np.inf) for token in range(6)]
    return {**settings, "tokens": tokens, "breakers": breakers, "penalties": penalties}


def main() -> None:
    samplers = Samplers(sys.argv[1])
    found = {
        "chains": [
            {"logits": logits, "asked": asked, "kept": chained(samplers, logits, asked)}
            for number, asked in enumerate(CHAINS)
            for logits in (logits_of(number), logits_of(50 + number, 0.7))
        ],
        "mirostats": [
            {"version": version, "tau": tau, "eta": eta, "steps": adapted(samplers, version, tau, eta)}
            for version, tau, eta in MIROSTATS
        ],
        "repeats": [repeated(samplers, seed) for seed in range(48)],
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
