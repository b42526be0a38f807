"""Encoded matrices beside all else that weights take part in: other forms, adapters, sleep, other checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from infd.kernels.select import CANDIDATES, EXACT, insisting, quantized, select
from infd.memory import ALL
from infd.models import registry
from infd.models.parameter import Matrix
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load
from infd.weights.stored import EncodedTensor
from tests.adapters.making import make as make_adapter
from tests.adapters.test_parity import Bench
from tests.kernels.paging import CPU
from tests.models.driving import Heap, load_model
from tests.runner.arenas.test_residence import answers, running
from tests.weights.encodings.fixtures import WRITTEN, expected, matrix, unpacked

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from infd.models.parameter import Parameter

SERVED = ("awq-g32", "ct-mixed", "ct-w4a16-tied", "mo-int4-awq")


@pytest.mark.parametrize("name", SERVED)
async def test_weights_are_read_again_after_sleep_and_replace_plain_ones(name: str, tmp_path: Path) -> None:
    plain = unpacked(name, tmp_path / "plain")
    async with running(plain) as (runs, capacity):
        want = await answers(runs, capacity)
        await runs.load_weights(str(WRITTEN / name), "/")
        assert await answers(runs, capacity) == want
        await runs.sleep(2)
        await runs.wake(ALL)
        assert await answers(runs, capacity) == want
        await runs.load_weights(str(plain), "/")
        assert await answers(runs, capacity) == want


def all_rows(parameter: Parameter) -> Tensor:
    """Return all rows of a parameter, in float32 if it is a matrix."""
    if not isinstance(parameter, Matrix):
        return parameter.tensor
    return parameter.look_up(torch.arange(sum(source.shape[0] for source in parameter.sources)))


@pytest.mark.parametrize("name", SERVED)
def test_weights_are_quantized_while_loading_like_plain_ones(name: str, tmp_path: Path) -> None:
    plain = unpacked(name, tmp_path / "plain")
    models = [load_model(path, ops=select(CPU, torch.float32, quantized("int8"))) for path in (WRITTEN / name, plain)]
    pairs = list(zip(*(model.parameters for model in models), strict=True))
    assert any(isinstance(ours, Matrix) and not ours.kept for ours, _ in pairs)
    for ours, theirs in pairs:
        if not ours.kept:  # the native kernels keep integers of eight bits
            assert all_rows(ours).equal(all_rows(theirs))


KEPT = {
    ("int4", "ct-w4a16-g32"): {"int4, groups of 32, kept"},
    ("int4", "ct-w4a16-g128"): {"int4, groups of 128, kept"},
    ("int4", "ct-w4a16-channel"): {"int4, a scale for each row, kept"},
    ("int4", "ct-w4a16-head"): {"int4, groups of 32, kept"},
    ("int4", "ct-w8a16"): {"int8, groups of 128, decoded: 8 bits, the form has 4"},
    ("int4", "ct-fp8"): {"fp8, one scale, decoded: its numbers are no integers"},
    ("int8", "ct-w8a8"): {"int8, a scale for each row, kept"},
    ("int8", "ct-w8a8-static-asym"): {"int8, a scale for each row, kept"},
    ("int8", "bnb-int8"): {"int8, a scale for each row, decoded: its weights have a second scale"},
    ("int8", "ct-w4a16-channel"): {"int4, a scale for each row, kept"},
}
# The reference's forms of int4 have neither zero points nor scales of other types, and its form of int8 has no groups;
# native forms keep these matrices.
DECODED = {
    ("int4", "ct-w4a16-asym-g32"): {"int4, groups of 32, zero points, decoded: the form has no zero points"},
    ("int8", "ct-w8a16"): {"int8, groups of 128, decoded: the form has one scale for each row"},
    ("int4", "gptq-desc-act"): {"int4, groups of 32, zero points, reordered, decoded: the form has no zero points"},
    ("int4", "mo-int4-awq"): {
        "int4, groups of 128, decoded: its scales are F32",
        "int4, groups of 128, decoded: its weights have a second scale",
    },
}
CASES = [
    *((native, *case, told) for native in ("native", "reference") for case, told in KEPT.items()),
    *(("reference", *case, told) for case, told in DECODED.items()),
]


@pytest.mark.parametrize(("candidates", "how", "name", "told"), CASES)
def test_integers_are_kept_as_they_are_where_the_form_takes_them(
    candidates: str, how: str, name: str, told: set[str], request: pytest.FixtureRequest
) -> None:
    if candidates == "native":
        request.getfixturevalue("built")
    chosen = insisting(candidates, quantized(how, how))
    with Checkpoint(WRITTEN / name) as checkpoint:
        ops = select(CPU, torch.float32, chosen)
        model = registry.build(
            checkpoint.config, ops, dtype=torch.float32, device=CPU, max_len=64, stored=checkpoint.tensors
        )
        found = load(model, checkpoint, Heap(CPU))
        assert {label.partition(", inputs ")[0] for label in found} == told
        assert found.total() == len(expected(name).digests)
        if "kept" not in next(iter(found)):
            return
        for parameter in model.parameters:
            matrices = all_rows(parameter)
            for source in parameter.sources:
                if isinstance(stored := checkpoint.tensors[source.name], EncodedTensor):
                    assert matrices[source.row : source.row + source.shape[0]].equal(matrix(stored.encoding))


@pytest.mark.parametrize("name", SERVED)
def test_adapters_add_to_encoded_matrices(name: str, tmp_path: Path) -> None:
    plain = unpacked(name, tmp_path / "plain")
    make_adapter(plain, tmp_path / "adapter")
    tokens = expected(name).tokens
    found = []
    for path in (WRITTEN / name, plain):
        bench = Bench(path, CPU, select(CPU, torch.float32, {**CANDIDATES, **EXACT}))
        bench.hold(1, tmp_path / "adapter")
        driver = bench.driver()
        found.append([driver.step((driver.start(tokens, slot=slot), len(tokens)))[0] for slot in (0, 1)])

    assert found[0][0].equal(found[1][0])
    assert found[0][1].equal(found[1][1])
    assert not found[0][0].equal(found[0][1])
