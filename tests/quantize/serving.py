"""What infd computes with a checkpoint, and which of its matrices are encoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.select import insisting, quantized, select
from infd.weights.checkpoint import Checkpoint
from infd.weights.stored import EncodedTensor
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

TOKENS = [5 + 7 * i % 50 for i in range(40)]


def names(directory: Path) -> set[str]:
    with Checkpoint(directory) as checkpoint:
        return {name for name, each in checkpoint.tensors.items() if isinstance(each, EncodedTensor)}


def logits(directory: Path, candidates: str, how: str, vocabulary: str, dtype: torch.dtype) -> Tensor:
    chosen = quantized(how, vocabulary)
    ops = select(CPU, dtype, insisting("reference", chosen) if candidates == "reference" else chosen)
    driver = Driver(load_model(directory, ops=ops, dtype=dtype), ops=ops)
    sequence = driver.start(TOKENS)
    return torch.cat([driver.step((sequence, count))[0] for count in (15, 1, 4, 20)])
