"""Measure loading a checkpoint: peak of anonymous memory, and time with the files in the page cache.

    python bench/loading.py                          1 GB, two files, as stored
    python bench/loading.py --mib 1024 --dtype float32
    python bench/loading.py --mib 96 --json          as tests/weights/test_memory.py runs it

The checkpoint has random weights, in a temporary directory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from infd.models.parameter import Parameter, Source
from infd.runner.arenas.arena import Arena
from infd.weights.checkpoint import INDEX, Checkpoint
from infd.weights.load import load, required_bytes

MIB = 2**20
HEAD_PARTS = 8  # the largest tensor, like an embedding, has an eighth of the bytes
LAYER_TENSORS = 7
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Model:
    """Parameters of realistic sizes: one large, many of a few megabytes, each from one stored tensor."""

    unread: frozenset[str] = frozenset()

    def __init__(self, stored_bytes: int, dtype: torch.dtype) -> None:
        elements = stored_bytes // 2  # as bfloat16
        columns = 1024 if stored_bytes >= 256 * MIB else 256
        head = elements // HEAD_PARTS // columns
        layers = max(1, elements // (64 * MIB))
        rows = (elements // columns - head) // (layers * LAYER_TENSORS)
        shapes = {"embed": (head, columns)}
        shapes |= {f"layer.{i}.{j}": (rows, columns) for i in range(layers) for j in range(LAYER_TENSORS)}
        self.parameters = [Parameter(shape, dtype, (Source(name, shape),)) for name, shape in shapes.items()]

    @property
    def largest_bytes(self) -> int:
        return max(required_bytes(_Only(parameter)) for parameter in self.parameters)


class _Only:
    unread: frozenset[str] = frozenset()

    def __init__(self, parameter: Parameter) -> None:
        self.parameters = [parameter]


def write(directory: Path, model: Model, files: int) -> None:
    """Write the model's tensors as bfloat16 into the given number of files."""
    (directory / "config.json").write_text("{}")
    noise = os.urandom(MIB)
    held: dict[str, str] = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        header: dict[str, object] = {}
        end = 0
        for parameter in model.parameters[number::files]:
            source = parameter.sources[0]
            begin, end = end, end + source.shape[0] * source.shape[1] * 2
            header[source.name] = {"dtype": "BF16", "shape": source.shape, "data_offsets": [begin, end]}
            held[source.name] = name
        encoded = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for start in range(0, end, MIB):
                file.write(noise[: min(MIB, end - start)])
    (directory / INDEX).write_text(json.dumps({"weight_map": held}))


def measure(directory: Path, stored_bytes: int, dtype: torch.dtype) -> dict[str, float]:
    """Load once. Sizes in bytes; `peak` is the rise of resident memory, without mapped files."""
    model = Model(stored_bytes, dtype)
    with Checkpoint(directory) as checkpoint:
        CLEAR_REFS.write_text("5")  # resets the high-water mark
        before = _resident("VmHWM:")
        arena = Arena(required_bytes(model), torch.device("cpu"), "weights")
        begun = time.perf_counter()
        load(model, checkpoint, arena)
        seconds = time.perf_counter() - begun
        peak = _resident("VmHWM:") - before
    return {"final": arena.size, "largest": model.largest_bytes, "peak": peak, "seconds": seconds}


def _resident(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the checkpoint")
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="stored is bfloat16")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object a repeat, nothing else")
    asked = parser.parse_args()
    dtype = getattr(torch, asked.dtype)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        write(Path(directory), Model(asked.mib * MIB, dtype), asked.files)
        figures = [measure(Path(directory), asked.mib * MIB, dtype) for _ in range(asked.repeats)]
    if asked.json:
        print("\n".join(map(json.dumps, figures)))
        return
    first = figures[0]
    above = (max(each["peak"] for each in figures) - first["final"]) / MIB
    seconds = statistics.median(each["seconds"] for each in figures)
    print(
        f"{asked.mib} MiB of bfloat16 in {asked.files} files, to {asked.dtype}: {first['final'] / MIB:.0f} MiB held,"
        f" peak {above:+.1f} MiB above that (largest tensor {first['largest'] / MIB:.0f} MiB);"
        f" {seconds:.3f} s, {asked.mib / 1024 / seconds:.2f} GiB/s (median of {len(figures)})"
    )


if __name__ == "__main__":
    main()
