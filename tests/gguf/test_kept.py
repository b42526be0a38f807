"""Models whose native kernels keep GGUF's blocks as integers and scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.cpu.fill import Fill
from infd.kernels.select import CANDIDATES, EXACT, insisting, select
from infd.memory import ALL
from infd.models import registry
from infd.weights import parts
from infd.weights.checkpoint import Checkpoint
from infd.weights.encodings.gguf import GROUPS
from infd.weights.load import load, required_bytes
from infd.weights.stored import EncodedTensor
from tests.gguf.writing import TYPES, write
from tests.kernels.paging import CPU
from tests.models.driving import load_model
from tests.models.test_parity import text
from tests.runner.arenas.test_residence import answers, running
from tests.tiny import make
from tests.weights.encodings.fixtures import matrix
from tests.weights.encodings.test_packed import logits, packed
from tests.weights.encodings.test_serving import all_rows
from tests.weights.test_load import Strict
from tests.weights.test_parts import Noting

if TYPE_CHECKING:
    from pathlib import Path

    from infd.models.base import Model

pytestmark = pytest.mark.usefixtures("built")

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


def assert_kept_to_the_bit(model: Model, path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        for parameter in model.parameters:
            rows = all_rows(parameter)
            for source in parameter.sources:
                if isinstance(stored := checkpoint.tensors[source.name], EncodedTensor):
                    assert rows[source.row : source.row + source.shape[0]].equal(matrix(stored.encoding)), source.name


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied"])
@pytest.mark.parametrize("kind", GROUPS)
def test_blocks_are_kept_and_logits_are_as_near_as_bfloat16_allows(kind: str, variant: str, tmp_path: Path) -> None:
    path = write(make(variant, tmp_path / "made", **WIDE), tmp_path / "model.gguf", TYPES[kind])
    tokens = text(1)
    model, ops, told = packed(path)

    assert told == {f"{kind}, kept"}
    assert_kept_to_the_bit(model, path)
    exact = [
        logits(load_model(path, ops=ops, dtype=dtype), ops, tokens)
        for dtype in (torch.float32, torch.bfloat16)
        if (ops := select(CPU, dtype, {**CANDIDATES, **EXACT}))
    ]
    assert 0 < (logits(model, ops, tokens) - exact[0]).norm() <= 2 * (exact[1] - exact[0]).norm()


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("Q4_K", "Q6_K"),  # as in files of Q4_K_M
        ("Q5_K", "Q6_K"),
        ("Q4_0", "Q8_0"),
        ("Q4_1", "Q6_K"),
        ("Q4_K", "Q5_0"),
        ("IQ4_XS", "Q5_K"),
        ("MXFP4", "Q8_0"),
        ("Q3_K", "Q2_K"),
    ],
)
def test_matrices_of_different_types_that_share_an_input_are_kept_together(
    kind: str, other: str, tmp_path: Path
) -> None:
    made = make("llama", tmp_path / "made", **WIDE)
    path = write(made, tmp_path / "model.gguf", TYPES[kind], others={"v_proj": TYPES[other], "up_proj": TYPES[other]})
    model, _, told = packed(path)

    assert told == {f"{kind}, kept", f"{other}, kept"}
    assert_kept_to_the_bit(model, path)


@pytest.mark.parametrize("variant", ["llama", "qwen3-tied", "mixtral"])
@pytest.mark.parametrize("kind", GROUPS)
def test_native_code_stores_blocks_as_python_places_them(
    kind: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(make(variant, tmp_path / "made", **WIDE), tmp_path / "model.gguf", TYPES[kind])
    expected, told = filled(path, None)
    natively = Noting(Fill())

    assert told
    assert filled(path, natively) == (expected, told)
    with Checkpoint(path) as checkpoint:
        found = [each.bytes for name, each in checkpoint.tensors.items() if each.packed() and ".gate." not in name]
    assert sum(part.bytes for part in natively.parts if part.pack) == sum(found), "of all but routers, which are floats"
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    assert filled(path, Noting(Fill())) == (expected, told), "in parts of a panel or a head"


def test_native_code_leaves_types_that_a_form_widens_to_python(tmp_path: Path) -> None:
    made = make("llama", tmp_path / "made", **WIDE)
    path = write(made, tmp_path / "model.gguf", TYPES.Q4_K, others={"v_proj": TYPES.Q6_K})
    natively = Noting(Fill())

    assert filled(path, natively) == filled(path, None)
    assert [part for part in natively.parts if part.pack], "those of the other layers' matrices"


def filled(path: Path, natively: Noting | None) -> tuple[bytes, dict[str, int]]:
    """Return the bytes of a model's weights, and the numbers of its encoded matrices as loading describes them."""
    ops = select(CPU, torch.bfloat16, {**CANDIDATES, "packed": insisting("native", CANDIDATES)["packed"]})
    with Checkpoint(path) as checkpoint:
        model = registry.build(
            checkpoint.config, ops, dtype=torch.bfloat16, device=CPU, max_len=64, stored=checkpoint.tensors
        )
        arena = Strict(required_bytes(model))
        told = load(model, checkpoint, arena, natively=natively)
    return arena.memory.numpy().tobytes(), told


async def test_blocks_are_read_again_after_sleep_and_by_load_weights(tmp_path: Path) -> None:
    made = make("llama", tmp_path / "made", **WIDE)
    path, other = (write(made, tmp_path / f"{kind.name}.gguf", kind) for kind in (TYPES.Q4_K, TYPES.Q4_1))
    async with running(path) as (runs, capacity):
        want = await answers(runs, capacity)
        for level in (1, 2):
            await runs.sleep(level)
            await runs.wake(ALL)
            assert await answers(runs, capacity) == want
        await runs.load_weights(str(path), "/")
        assert await answers(runs, capacity) == want
        with pytest.raises(CheckpointError, match="kept as another checkpoint stores them"):
            await runs.load_weights(str(other), "/")


def test_a_plain_matrix_among_quantized_ones_leaves_them_decoded(tmp_path: Path) -> None:
    made = make("llama", tmp_path / "made", **WIDE)
    path = write(made, tmp_path / "model.gguf", TYPES.Q8_0, others={"v_proj": TYPES.F32})
    model, _, told = packed(path)

    assert told == {"Q8_0, kept", "Q8_0, decoded: the matrices with the same input are stored differently"}
    assert_kept_to_the_bit(model, path)
