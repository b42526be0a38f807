"""Timing for bench/gpu.py: the device, its peak rates, and models' least memory traffic and arithmetic."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infd.runner.arenas.vram import bank_of
from infd.runner.cuda_graphs.capture import CudaGraphs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from infd.models.base import Model
    from infd.runner.cuda_graphs.capture import Graphs

PAGE = 16
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "tiny": {
        **_QWEN3,
        "vocab_size": 8192,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
}


class Machine(NamedTuple):
    """A device's rates: bytes per second, read plus written; operations per second of a matrix product."""

    bytes_s: float
    flops: float

    def floor(self, bytes_moved: float, operations: float = 0.0) -> float:
        return max(bytes_moved / self.bytes_s, operations / self.flops)


class Timed(NamedTuple):
    """Seconds of one call, launched by the host and replayed in a graph; None if not captured."""

    launched: float
    replayed: float | None

    @property
    def best(self) -> float:
        return self.launched if self.replayed is None else self.replayed


class Again:
    """Implements `runner.cuda_graphs.capture.Graphs` without a GPU: replay launches the work again."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class Bench:
    """One device, with functions to time work on it."""

    def __init__(self, device: torch.device, rounds: int, figures: Figures) -> None:
        self.device = device
        self.bank = bank_of(device)
        self.figures = figures
        self._rounds = rounds
        self._graphs: Graphs = CudaGraphs(device) if device.type == "cuda" else Again()
        self.machine = self._measure()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], object], *, times: int = 20) -> float:
        """Return the median of several rounds, each the mean of `times` calls, after one warm-up call."""
        work()
        rounds = []
        for _ in range(self._rounds):
            self.wait()
            started = time.perf_counter()
            for _ in range(times):
                work()
            self.wait()
            rounds.append((time.perf_counter() - started) / times)
        return statistics.median(rounds)

    def timed(self, work: Callable[[], object], *, times: int = 20) -> Timed:
        """Time a kernel launched (for short kernels the host's time) and replayed (the device's time)."""

        def many() -> None:
            for _ in range(times):
                work()

        launched = self.seconds(work, times=times)
        try:
            replay = self._graphs.capture(many)
        except Exception as error:  # any error of a library loses this figure only
            print(f"not captured: {error!r}")
            return Timed(launched, None)
        return Timed(launched, self.seconds(replay, times=1) / times)

    def _measure(self) -> Machine:
        large = self.device.type == "cuda"
        source = torch.zeros(2**31 if large else 2**24, dtype=torch.uint8, device=self.device)
        target, size = torch.empty_like(source), 8192 if large else 256
        square = torch.randn(size, size, device=self.device).bfloat16()
        return Machine(
            2 * source.numel() / self.seconds(lambda: target.copy_(source)),
            2 * size**3 / self.seconds(lambda: square @ square),
        )


class Figures:
    """Prints each figure and writes it at once as a line of JSON, so that an interrupted run keeps its results."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.model = ""

    def write(self, told: dict[str, Any]) -> None:
        self._file.write(json.dumps(told) + "\n")
        self._file.flush()

    def report(self, name: str, seconds: float, floor: float, note: str = "", **more: float) -> None:
        times = seconds / floor
        print(
            f"{name:44} {seconds * 1e6:11,.1f} us   floor {floor * 1e6:10,.1f} us   x{times:6.2f}   {note}", flush=True
        )
        found = {"us": seconds * 1e6, "floor_us": floor * 1e6, "times": times, **more}
        self.write({"model": self.model, "name": name, **found, "note": note})

    def note(self, name: str, **found: float) -> None:
        """Write a figure without a floor."""
        self.write({"model": self.model, "name": name, **found})

    def kernel(self, name: str, timed: Timed, floor: float, **exact: float) -> None:
        """Report a kernel's time, replayed and launched.

        exact  `off`: largest difference from the reference; `others`: number of tokens that differ from it
        """
        launched = timed.launched * 1e6
        said = "   ".join([f"launched {launched:,.1f} us", *(f"{key} {value:.3g}" for key, value in exact.items())])
        self.report(name, timed.best, floor, said, launched_us=launched, **exact)


class Shape(NamedTuple):
    """Dimensions of a model relevant to kernels."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocab: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head = config.get("head_dim", hidden // heads)
        kv_heads = config["num_key_value_heads"]
        return cls(hidden, config["intermediate_size"], heads, kv_heads, head, config["vocab_size"])


class Traffic(NamedTuple):
    """Least memory traffic of steps, in bytes, and least arithmetic.

    read   weights read by every step; ends: the head's part of them
    token  cache bytes read by a token for each earlier token
    """

    machine: Machine
    read: float
    ends: float
    token: float

    @classmethod
    def of(cls, machine: Machine, model: Model, config: dict[str, Any]) -> Traffic:
        parameters = [parameter.tensor.nbytes for parameter in model.parameters]
        ends = parameters[0]  # the embedding, of which a step reads few rows; an untied head has the same size
        layers = sum(len(group.layers) for group in model.cache_layout(PAGE).groups)
        token = layers * sum(each.bytes for each in model.page_tensors(PAGE)) / PAGE
        return cls(machine, sum(parameters) - (0 if config["tie_word_embeddings"] else ends), ends, token)

    def prompt(self, length: int) -> float:
        return self.machine.floor(self.read, (self.read - self.ends) * length)

    def decoding(self, batch: int, context: float, more: float = 0.0) -> float:
        """`more`: further bytes read."""
        return self.machine.floor(self.read + batch * context * self.token + more, self.read * batch)

    def mixed(self, batch: int, context: float, tokens: int) -> float:
        """Return the floor of the same step with `tokens` of a prompt."""
        operations = self.read * batch + (self.read - self.ends) * tokens
        return self.machine.floor(self.read + (batch * context + tokens) * self.token, operations)
