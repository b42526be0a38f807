"""Checkpoints that other software wrote: their weights to the bit, and the logits that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from infd.kernels.select import CANDIDATES, EXACT, insisting, select
from infd.weights.checkpoint import Checkpoint
from infd.weights.stored import EncodedTensor
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.tiny import margins
from tests.weights.encodings.fixtures import MANY_EXHAUSTIVE, NAMES, WRITTEN, digest, expected, matrix

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def logits(name: str, dtype: torch.dtype) -> Tensor:
    """Return the logits of the recorded tokens, computed in two chunks by the reference kernels, inputs as they are."""
    ops = select(CPU, dtype, {**insisting("reference", CANDIDATES), "inputs": EXACT["inputs"]})
    model = load_model(WRITTEN / name, ops=ops, dtype=dtype)
    driver = Driver(model, ops=ops)
    sequence = driver.start(expected(name).tokens)
    return torch.cat([driver.step((sequence, count))[0] for count in (15, len(sequence.tokens) - 15)])


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_the_writers_own_dequantized_weights(name: str) -> None:
    told = expected(name).digests
    with Checkpoint(WRITTEN / name) as checkpoint:
        found = {key: each for key, each in checkpoint.tensors.items() if isinstance(each, EncodedTensor)}
        assert found.keys() == told.keys()
        for key, (dtype, digested) in told.items():
            whole = matrix(found[key].encoding)
            assert digested in (digest(whole.to(DTYPES[dtype])), digest(whole.to(DTYPES[dtype]) + 0)), key  # or no -0
            assert matrix(found[key].encoding, 128).equal(whole)


@pytest.mark.parametrize("name", MANY_EXHAUSTIVE)
def test_logits_are_as_near_as_bfloat16_allows(name: str) -> None:
    told = expected(name)
    near = 2 * (told.half - told.logits).norm()

    exact, half = logits(name, torch.float32), logits(name, torch.bfloat16)

    assert (exact - told.logits).norm() <= near
    assert (half - told.logits).norm() <= near
    clear = margins(told.logits) > 10 * (told.half - told.logits).abs().max()
    assert clear.sum() >= 3
    assert exact.argmax(-1)[clear].equal(told.logits.argmax(-1)[clear])
    assert half.argmax(-1)[clear].equal(told.logits.argmax(-1)[clear])
