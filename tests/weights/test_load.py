"""Checkpoint tensors are loaded into the right rows, or loading fails before any is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from infd.errors import CheckpointError
from infd.models.parameter import Parameter
from infd.weights import load as load_module
from infd.weights.checkpoint import Checkpoint
from infd.weights.formats import plain
from infd.weights.load import ALIGNMENT, load, required_bytes
from tests.weights.checkpoints import write, write_sharded

if TYPE_CHECKING:
    from torch import Tensor


class Piece:
    def __init__(self, name: str, shape: tuple[int, ...], row: int = 0) -> None:
        self.name, self.shape, self.row, self.view = name, shape, row, None
        self.rows = shape[0] if shape else 1


class Slot(Parameter):
    def __init__(self, shape: tuple[int, ...], *sources: Piece, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(shape, dtype, sources)


class Turned(Slot):
    """A matrix whose layout differs from the checkpoint's."""

    def rows(self, first: int, count: int) -> None:
        return None

    def place(self, first: int, rows: Tensor) -> None:
        self.tensor[:, first : first + len(rows)] = rows.T


class Shelf:
    """A minimal Loadable."""

    def __init__(self, *parameters: Slot, unread: frozenset[str] = frozenset()) -> None:
        self.parameters, self.unread = parameters, unread


class Strict:
    """An arena of exactly `size` bytes."""

    def __init__(self, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        start = -(-self.used // ALIGNMENT) * ALIGNMENT
        self.used = start + torch.Size(shape).numel() * dtype.itemsize
        return self.memory[start : self.used].view(dtype).view(shape)


def filled(model: Shelf, directory, progress=None) -> Strict:
    arena = Strict(required_bytes(model))
    with Checkpoint(directory) as checkpoint:
        load(model, checkpoint, arena, progress)
    return arena


def refusal(model: Shelf, directory) -> str:
    arena = Strict(required_bytes(model))
    with Checkpoint(directory) as checkpoint, pytest.raises(CheckpointError) as refused:
        load(model, checkpoint, arena)
    assert arena.used == 0
    assert not hasattr(model.parameters[0], "tensor")
    return str(refused.value)


def test_tensors_stack_into_one_parameter_in_the_arena(tmp_path):
    q, k = torch.randn(4, 3), torch.randn(2, 3)
    fused = Slot((6, 3), Piece("q", (4, 3)), Piece("k", (2, 3), 4))
    arena = filled(Shelf(fused), write(tmp_path, {"k": k, "q": q}))
    assert fused.tensor.equal(torch.cat((q, k)))
    assert fused.tensor.data_ptr() == arena.memory.data_ptr()


def test_shards_load_like_one_file(tmp_path):
    a, b = Slot((2,), Piece("a", (2,))), Slot((1, 2), Piece("b", (1, 2)))
    shards = {"1.safetensors": {"b": torch.ones(1, 2)}, "2.safetensors": {"a": torch.zeros(2)}}
    filled(Shelf(a, b), write_sharded(tmp_path, shards))
    assert a.tensor.tolist() == [0, 0]
    assert b.tensor.tolist() == [[1, 1]]


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.float16, torch.bfloat16])
def test_types_are_converted_on_the_way(tmp_path, monkeypatch, stored, wanted):
    monkeypatch.setattr(plain, "CHUNK_BYTES", 16)  # several chunks, the last one short
    weight = torch.randn(5, 3).to(stored)
    slot = Slot((5, 3), Piece("w", (5, 3)), dtype=wanted)
    filled(Shelf(slot), write(tmp_path, {"w": weight}))
    assert slot.tensor.dtype == wanted
    assert slot.tensor.equal(weight.to(wanted))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_tensors_of_another_layout_are_placed_part_by_part(tmp_path, monkeypatch, stored):
    monkeypatch.setattr(plain, "CHUNK_BYTES", 1024)
    first, second = torch.randn(200, 3).to(stored), torch.randn(7, 3).to(stored)
    slot = Turned((3, 207), Piece("a", (200, 3)), Piece("b", (7, 3), 200))
    seen: list[tuple[int, int]] = []
    filled(Shelf(slot), write(tmp_path, {"a": first, "b": second}), lambda *at: seen.append(at))
    assert slot.tensor.equal(torch.cat((first, second)).float().T)
    assert seen[-1] == (207 * 3 * stored.itemsize,) * 2
    assert len(seen) > 2


def test_scalars_and_empty_tensors_load(tmp_path):
    empty, one, number = Slot((0, 4), Piece("e", (0, 4))), Slot((1,), Piece("o", (1,))), Slot((), Piece("n", ()))
    stored = {"e": torch.empty(0, 4), "o": torch.ones(1), "n": torch.tensor(2.0)}
    filled(Shelf(empty, one, number), write(tmp_path, stored))
    assert one.tensor.item() == 1
    assert number.tensor.item() == 2


def test_required_bytes_count_the_alignment():
    model = Shelf(Slot((3,), Piece("a", (3,))), Slot((5, 7), Piece("b", (5, 7)), dtype=torch.bfloat16))
    assert required_bytes(model) == ALIGNMENT + 2 * ALIGNMENT


def test_progress_counts_from_nothing_up_to_the_bytes_that_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(plain, "CHUNK_BYTES", 16)
    seen: list[tuple[int, int]] = []
    model = Shelf(Slot((6,), Piece("w", (6,))), unread=frozenset({"spare"}))
    filled(model, write(tmp_path, {"w": torch.ones(6), "spare": torch.ones(9)}), lambda *at: seen.append(at))
    assert seen == [(0, 24), (16, 24), (24, 24)]


def test_well_known_tables_and_unread_names_may_be_left_over(tmp_path):
    slot = Slot((1,), Piece("w", (1,)))
    spare = {"lm_head.weight": torch.ones(1), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    filled(Shelf(slot, unread=frozenset({"lm_head.weight"})), write(tmp_path, {"w": torch.ones(1), **spare}))
    assert slot.tensor.item() == 1


def test_all_problems_are_named_at_once(tmp_path):
    model = Shelf(
        Slot((2, 3), Piece("gone", (2, 3))), Slot((2, 3), Piece("turned", (2, 3))), Slot((4,), Piece("small", (4,)))
    )
    tensors = {"turned": torch.ones(3, 2), "small": torch.ones(4, dtype=torch.int8), "extra": torch.ones(1)}
    assert refusal(model, write(tmp_path, tensors)).splitlines() == [
        f"{tmp_path}:",
        "  gone: missing, expected [2, 3]",
        "  turned: expected [2, 3], found [3, 2] in model.safetensors",
        "  small: expected one of F64, F32, F16, BF16, found I8 in model.safetensors",
        "  extra: left over, F32 [1] in model.safetensors",
    ]


def test_a_flood_of_problems_is_cut_short(tmp_path):
    count = load_module.PROBLEMS_SHOWN + 5
    model = Shelf(*(Slot((1,), Piece(f"w{i}", (1,))) for i in range(count)))
    lines = refusal(model, write(tmp_path, {})).splitlines()
    assert len(lines) == load_module.PROBLEMS_SHOWN + 2
    assert lines[-1] == "  and 5 more"
