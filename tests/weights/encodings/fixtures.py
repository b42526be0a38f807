"""The checkpoints in `written/`, which other software wrote: see `make_written.py`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from infd.weights.checkpoint import Checkpoint
from infd.weights.encodings.rows import read, rows_of
from infd.weights.stored import ROWS, EncodedTensor

if TYPE_CHECKING:
    from torch import Tensor

    from infd.weights.stored import Encoding

WRITTEN = Path(__file__).parent / "written"
NAMES = sorted(path.name for path in WRITTEN.iterdir() if path.is_dir())
SOME = (
    "awq-g32",
    "bnb-nf4",
    "ct-mixed",
    "ct-nvfp4",
    "ct-w4a16-asym-g32",
    "fp8-block",
    "gptq-desc-act",
    "mo-int4-awq",
)
# For tests too long to run with all checkpoints each time.
MANY_EXHAUSTIVE = [name if name in SOME else pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES]


class Expected(NamedTuple):
    """Results of the writer's software.

    logits   [T, vocab] of `tokens` with the dequantized weights, computed in float32; `half`: in bfloat16
    digests  by matrix: dtype of the dequantized numbers, and their SHA-256
    """

    tokens: list[int]
    logits: Tensor
    half: Tensor
    digests: dict[str, tuple[str, str]]


def expected(name: str) -> Expected:
    path = WRITTEN / name / "expected.safetensors"
    held = load_file(path)
    with safe_open(path, "pt") as file:
        digests = {matrix: tuple(told.split()) for matrix, told in file.metadata().items()}
    return Expected(held["tokens"].tolist(), held["logits"], held["half"], digests)


def matrix(encoding: Encoding, step: int = ROWS) -> Tensor:
    """Return a whole matrix, float32 [rows, inputs], computed in chunks of `step` rows."""
    *leading, _ = encoding.shape
    count, compute = torch.Size(leading).numel(), rows_of(encoding)
    return torch.cat([compute(first, min(step, count - first)) for first in range(0, count, step)])


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def unpacked(checkpoint: str | Path, directory: Path) -> Path:
    """Save a checkpoint with its encoded matrices as plain float32 into `directory`.

    checkpoint  a name of `written/`, or the path of a checkpoint
    """
    tensors = {}
    with Checkpoint(WRITTEN / checkpoint) as opened:
        config = dict(opened.config)
        for key, stored in opened.tensors.items():
            whole = matrix(stored.encoding) if isinstance(stored, EncodedTensor) else read(stored).float()
            if not key.endswith(("k_scale", "v_scale")):
                tensors[key] = whole.view(stored.shape).clone()
    config.pop("quantization_config", None)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory
