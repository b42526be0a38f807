"""What bench/gpu.py times with: a device, what it can do at best, and what models ask of it at least."""

from __future__ import annotations

import json
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infd.runner.arenas.vram import bank_of
from infd.runner.graphs import CudaGraphs

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

    from infd.models.base import Model
    from infd.runner.graphs import Graphs

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
    """What a device can do: bytes a second, read and written; operations a second of a matrix product."""

    bytes_s: float
    flops: float

    def floor(self, bytes_moved: float, operations: float = 0.0) -> float:
        return max(bytes_moved / self.bytes_s, operations / self.flops)


class Timed(NamedTuple):
    """Seconds of one call, launched by the host, and replayed as part of a graph; None where it is not captured."""

    launched: float
    replayed: float | None

    @property
    def best(self) -> float:
        return self.launched if self.replayed is None else self.replayed


class Again:
    """Implements `runner.graphs.Graphs` where there is no GPU: what is replayed is launched once more."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class Bench:
    """One device, and how to time on it."""

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
        """Return the median of some rounds, each the mean of `times` calls. The first call is not counted."""
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
        """Time a kernel launched, which of a short one is the host's time, and replayed, which is the device's."""

        def many() -> None:
            for _ in range(times):
                work()

        launched = self.seconds(work, times=times)
        try:
            replay = self._graphs.capture(many)
        except Exception as error:  # a library's own, whatever it raises: the other figures stand
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
    """Prints each figure, and writes it down at once, a line of JSON: a run that is cut short keeps what it found."""

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
        """Write what has no floor."""
        self.write({"model": self.model, "name": name, **found})

    def kernel(self, name: str, timed: Timed, floor: float, **exact: float) -> None:
        """Report the time of a kernel alone, beside what launching it takes.

        exact  `off`: how far results are from the reference's at most; `others`: how many tokens are not its own
        """
        launched = timed.launched * 1e6
        said = "   ".join([f"launched {launched:,.1f} us", *(f"{key} {value:.3g}" for key, value in exact.items())])
        self.report(name, timed.best, floor, said, launched_us=launched, **exact)


class Shape(NamedTuple):
    """Sizes of a model that its kernels see."""

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
    """What steps must move at least, in bytes, and multiply.

    read   weights, by every step; ends: of these the head
    token  of the cache, by every token for each one before it
    """

    machine: Machine
    read: float
    ends: float
    token: float

    @classmethod
    def of(cls, machine: Machine, model: Model, config: dict[str, Any]) -> Traffic:
        parameters = [parameter.tensor.nbytes for parameter in model.parameters]
        ends = parameters[0]  # the embedding, looked up; the head is as large, unless it is the embedding
        layers = sum(len(group.layers) for group in model.cache_layout(PAGE).groups)
        token = layers * sum(each.bytes for each in model.page_tensors(PAGE)) / PAGE
        return cls(machine, sum(parameters) - (0 if config["tie_word_embeddings"] else ends), ends, token)

    def prompt(self, length: int) -> float:
        return self.machine.floor(self.read, (self.read - self.ends) * length)

    def decoding(self, batch: int, context: float, more: float = 0.0) -> float:
        """more: bytes that are read besides"""
        return self.machine.floor(self.read + batch * context * self.token + more, self.read * batch)

    def mixed(self, batch: int, context: float, tokens: int) -> float:
        """Return the same with `tokens` of a prompt beside them."""
        operations = self.read * batch + (self.read - self.ends) * tokens
        return self.machine.floor(self.read + (batch * context + tokens) * self.token, operations)
