"""Integers of a checkpoint that native kernels keep, because the checkpoint stores them, and products with them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from infd.errors import CheckpointError
from infd.kernels.reference.dense import Stack
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
from tests.models.driving import Driver, Heap, load_model
from tests.runner.arenas.test_residence import answers, running
from tests.tiny import margins
from tests.weights.encodings.fixtures import WRITTEN, expected, matrix, unpacked
from tests.weights.encodings.test_serving import all_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from infd.kernels.ops import Ops
    from infd.kernels.select import Candidate
    from infd.models.base import Model

pytestmark = pytest.mark.usefixtures("built")

ZEROS = "int4, groups of 32, zero points"
SECOND = "int4, groups of 128, decoded: its weights have a second scale"
KEPT = {
    "awq-g128": {"int4, groups of 128, zero points, kept"},
    "awq-g32": {f"{ZEROS}, kept"},
    "bnb-int8": {"int8, a scale for each row, decoded: its weights have a second scale"},
    "ct-fp8": {"fp8, one scale, decoded: the form of fp8 computes in bfloat16"},
    "ct-mixed": {
        "int4, groups of 32, kept",
        "int8, groups of 32, kept",
        "fp8, a scale for each row, decoded: the form of fp8 computes in bfloat16",
    },
    "ct-mxfp4a16": {"mxfp4, kept"},
    "ct-mxfp8": {"mxfp8, decoded: the form of fp8 computes in bfloat16"},
    "ct-nvfp4a16": {"nvfp4, groups of 16, kept"},
    "ct-w4a16-asym-channel": {"int4, a scale for each row, zero points, kept"},
    "ct-w4a16-asym-g32": {f"{ZEROS}, kept"},
    "ct-w4a16-channel": {"int4, a scale for each row, kept"},
    "ct-w4a16-g128": {"int4, groups of 128, kept"},
    "ct-w4a16-g32": {"int4, groups of 32, kept"},
    "ct-w4a16-head": {"int4, groups of 32, kept"},
    "ct-w4a16-static-order": {"int4, groups of 32, kept"},
    "ct-w4a16-tied": {"int4, groups of 32, kept"},
    "ct-w8a8": {"int8, a scale for each row, kept"},
    "gptq-asym": {f"{ZEROS}, kept"},
    "gptq-channel": {"int4, a scale for each row, zero points, kept"},
    "gptq-desc-act": {f"{ZEROS}, reordered, kept"},
    "gptq-g128": {"int4, groups of 128, zero points, kept"},
    "gptq-g32": {f"{ZEROS}, kept"},
    "gptq-int8": {"int8, groups of 32, zero points, kept"},
    "gptq-v2": {f"{ZEROS}, kept"},
    "mo-int4-awq": {"int4, groups of 128, kept", SECOND},
    "mo-mxfp4": {"mxfp4, kept"},
    "mo-nvfp4": {"nvfp4, groups of 16, kept"},
}
FLOAT8 = {
    "ct-fp8": "fp8, one scale, kept",
    "ct-fp8-block": "fp8, blocks of 128 x 128, kept",
    "ct-fp8-dynamic": "fp8, a scale for each row, kept",
    "ct-mxfp8": "mxfp8, kept",
    "fp8-block": "fp8, blocks of 128 x 128, kept",
    "fp8-block-e8m0": "fp8, blocks of 128 x 128, kept",
    "mo-fp8": "fp8, one scale, kept",
    "mo-fp8-block": "fp8, blocks of 128 x 128, kept",
    "mo-fp8-cache": "fp8, one scale, kept",
    "mo-fp8-channel": "fp8, a scale for each row, kept",
    "mo-mxfp8": "mxfp8, kept",
}
SOME = ("ct-nvfp4a16", "ct-w8a8", "gptq-asym", "gptq-desc-act")


def packed(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    candidates: Mapping[str, Sequence[Candidate]] = CANDIDATES,
    *,
    rounding: bool = False,
) -> tuple[Model, Ops, set[str]]:
    """Return a model whose packed family is native, its ops, and the matrices as loading describes them.

    How inputs are quantized is not described: see test_inputs.py. rounding: round them by the checkpoint's scheme.
    """
    inputs = insisting("native", CANDIDATES)["inputs"] if rounding else EXACT["inputs"]
    ops = select(CPU, dtype, {**CANDIDATES, "packed": insisting("native", candidates)["packed"], "inputs": inputs})
    with Checkpoint(directory) as checkpoint:
        model = registry.build(checkpoint.config, ops, dtype=dtype, device=CPU, max_len=64, stored=checkpoint.tensors)
        return model, ops, {told.partition(", inputs ")[0] for told in load(model, checkpoint, Heap(CPU))}


def logits(model: Model, ops: Ops, tokens: list[int]) -> Tensor:
    """Return the logits of `tokens`, computed in two chunks."""
    driver = Driver(model, ops=ops)
    sequence = driver.start(tokens)
    return torch.cat([driver.step((sequence, count))[0] for count in (15, len(tokens) - 15)])


@pytest.mark.parametrize("name", KEPT)
def test_integers_are_kept_to_the_bit_where_a_form_takes_them(name: str) -> None:
    model, _, told = packed(WRITTEN / name)

    assert told == KEPT[name]
    with Checkpoint(WRITTEN / name) as checkpoint:
        for parameter in model.parameters:
            found = all_rows(parameter)
            for source in parameter.sources:
                if isinstance(stored := checkpoint.tensors[source.name], EncodedTensor):
                    part = found[source.row : source.row + source.shape[0]]
                    want = matrix(stored.encoding)
                    assert part.equal(want if parameter.kept else want.to(part.dtype)), source.name


@pytest.mark.parametrize("name", [name for name, told in KEPT.items() if any(each.endswith("kept") for each in told)])
def test_logits_with_int8_activations_are_as_near_as_bfloat16_allows(name: str) -> None:
    told = expected(name)
    near = 2 * (told.half - told.logits).norm()
    clear = margins(told.logits) > 10 * (told.half - told.logits).abs().max()
    for dtype in (torch.float32, torch.bfloat16):
        model, ops, _ = packed(WRITTEN / name, dtype)
        found = logits(model, ops, told.tokens)
        assert (found - told.logits).norm() <= near
        assert found.argmax(-1)[clear].equal(told.logits.argmax(-1)[clear])


@pytest.mark.parametrize("candidates", [CANDIDATES, EXACT], ids=["default", "exact"])
@pytest.mark.parametrize("name", FLOAT8)
def test_fp8_is_kept_and_multiplied_with_bfloat16(name: str, candidates: Mapping[str, Sequence[Candidate]]) -> None:
    model, ops, found = packed(WRITTEN / name, torch.bfloat16, candidates)

    assert found == {FLOAT8[name]}
    with Checkpoint(WRITTEN / name) as checkpoint:
        for parameter in model.parameters:
            rows = all_rows(parameter)
            for source in parameter.sources:
                if isinstance(stored := checkpoint.tensors[source.name], EncodedTensor):
                    assert rows[source.row : source.row + source.shape[0]].equal(matrix(stored.encoding).bfloat16())
    told = expected(name)
    clear = margins(told.logits) > 10 * (told.half - told.logits).abs().max()
    computed = logits(model, ops, told.tokens)
    assert (computed - told.logits).norm() <= 2 * (told.half - told.logits).norm()
    assert computed.argmax(-1)[clear].equal(told.logits.argmax(-1)[clear])


@pytest.mark.parametrize(
    "name", [*SOME, "ct-fp8", "ct-fp8-dynamic", "ct-w8a8-static-asym", "fp8-block", "mo-mxfp4", "mo-nvfp4"]
)
def test_layers_in_one_call_equal_each_layer(name: str) -> None:
    model, ops, _ = packed(WRITTEN / name, torch.bfloat16, rounding=True)
    assert getattr(model, "stacked", None) is not None
    tokens = expected(name).tokens
    alone = ops.replace(stack=Stack())
    with Checkpoint(WRITTEN / name) as checkpoint:
        apart = registry.build(
            checkpoint.config, alone, dtype=torch.bfloat16, device=CPU, max_len=64, stored=checkpoint.tensors
        )
        load(apart, checkpoint, Heap(CPU))
    assert logits(model, ops, tokens).equal(logits(apart, alone, tokens))


@pytest.mark.parametrize("name", SOME)
def test_exact_activations_decode(name: str, tmp_path: Path) -> None:
    ops = select(CPU, torch.float32, {**CANDIDATES, **EXACT})
    tokens = expected(name).tokens
    plain, decoded = (load_model(path, ops=ops) for path in (unpacked(name, tmp_path), WRITTEN / name))
    assert logits(decoded, ops, tokens).equal(logits(plain, ops, tokens))
    assert not logits(*packed(WRITTEN / name)[:2], tokens).equal(logits(plain, ops, tokens))


@pytest.mark.parametrize("name", SOME)
async def test_weights_survive_sleep_and_other_kinds_of_weights_are_refused(name: str, tmp_path: Path) -> None:
    plain = unpacked(name, tmp_path / "plain")
    another = next(each for each in ("ct-w8a8", "gptq-asym") if each != name)  # of integers, as every form can keep
    async with running(WRITTEN / name) as (runs, capacity):
        assert any("kept" in told for told in runs.describe()["stored"])
        want = await answers(runs, capacity)
        for level in (1, 2):
            await runs.sleep(level)
            await runs.wake(ALL)
            assert await answers(runs, capacity) == want
        await runs.load_weights(str(WRITTEN / name), "/")
        assert await answers(runs, capacity) == want
        with pytest.raises(CheckpointError, match="kept as another checkpoint stores them; it is not quantized"):
            await runs.load_weights(str(plain), "/")
        with pytest.raises(CheckpointError, match=r"kept as another checkpoint stores them; .*the form"):
            await runs.load_weights(str(WRITTEN / another), "/")
        assert await answers(runs, capacity) == want


@pytest.mark.parametrize("name", SOME)
def test_adapters_add_to_kept_matrices(name: str, tmp_path: Path) -> None:
    plain = unpacked(name, tmp_path / "plain")
    make_adapter(plain, tmp_path / "adapter")
    told = expected(name)
    near = 2 * (told.half - told.logits).norm()
    found = []
    for path in (WRITTEN / name, plain):
        bench = Bench(path, CPU)
        bench.hold(1, tmp_path / "adapter")
        driver = bench.driver()
        found.append([driver.step((driver.start(told.tokens, slot=slot), len(told.tokens)))[0] for slot in (0, 1)])

    assert any(isinstance(each, Matrix) and each.kept for each in packed(WRITTEN / name)[0].parameters)
    for kept, exact in zip(*found, strict=True):
        assert 0 < (kept - exact).norm() <= near
    assert (found[0][0] - found[0][1]).norm() > 4 * near


def changed(name: str, directory: Path, tensor: str, change: dict[int, int]) -> Path:
    """Save a written checkpoint with the numbers at some indices of one tensor replaced."""
    shutil.copytree(WRITTEN / name, directory)
    tensors = load_file(WRITTEN / name / "model.safetensors")
    key = next(key for key in tensors if key.endswith(tensor))
    for index, number in change.items():
        tensors[key][index] = number
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_modules_that_reorder_the_same_inputs_differently_are_decoded(tmp_path: Path) -> None:
    order = load_file(WRITTEN / "gptq-desc-act" / "model.safetensors")["model.layers.0.self_attn.k_proj.g_idx"].tolist()
    other = next(at for at, group in enumerate(order) if group != order[0])
    exchange = {0: order[other], other: order[0]}
    model, _, told = packed(changed("gptq-desc-act", tmp_path / "c", "layers.0.self_attn.k_proj.g_idx", exchange))
    reason = "the matrices with the same input are stored differently"
    assert told == {f"{ZEROS}, reordered, kept", f"{ZEROS}, reordered, decoded: {reason}"}
    with Checkpoint(tmp_path / "c") as checkpoint:
        for parameter in model.parameters:
            for source in parameter.sources:
                if isinstance(stored := checkpoint.tensors[source.name], EncodedTensor):
                    part = all_rows(parameter)[source.row : source.row + source.shape[0]]
                    assert part.equal(matrix(stored.encoding)), source.name


def test_groups_of_different_sizes_are_decoded(tmp_path: Path) -> None:
    order = load_file(WRITTEN / "gptq-desc-act" / "model.safetensors")["model.layers.0.mlp.down_proj.g_idx"].tolist()
    directory = changed("gptq-desc-act", tmp_path / "c", "layers.0.mlp.down_proj.g_idx", {order.index(1): 0})
    assert f"{ZEROS}, reordered, decoded: its groups differ in size" in packed(directory)[2]


@pytest.mark.parametrize(
    ("how", "name", "told"),
    [
        ("int4", "gptq-asym", {f"{ZEROS}, kept"}),
        ("int4", "mo-int4-awq", {"int4, groups of 128, kept", SECOND}),
        ("int8", "mo-nvfp4", {"nvfp4, groups of 16, decoded: the form has one scale for each row"}),
        ("int4", "mo-mxfp4", {"mxfp4, decoded: its numbers are no integers"}),
        ("int8", "gptq-asym", {f"{ZEROS}, decoded: 4 bits, the form has 8"}),
        ("int8", "ct-w8a8", {"int8, a scale for each row, kept"}),
        ("int8", "ct-w8a16", {"int8, groups of 128, kept"}),
    ],
)
def test_weights_made_smaller_keep_integers_of_as_many_bits(how: str, name: str, told: set[str]) -> None:
    ops = select(CPU, torch.float32, insisting("native", quantized(how, how)))
    with Checkpoint(WRITTEN / name) as checkpoint:
        model = registry.build(
            checkpoint.config, ops, dtype=torch.float32, device=CPU, max_len=64, stored=checkpoint.tensors
        )
        assert {label.partition(", inputs ")[0] for label in load(model, checkpoint, Heap(CPU))} == told
