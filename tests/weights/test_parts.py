"""Native code fills parameters as Python would place them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.cpu.fill import Fill
from infd.kernels.cpu.groups import Int4
from infd.kernels.cpu.linear import Int8, Matrices
from infd.models.parameter import Matrix, MatrixStack, Parameter, Source
from infd.weights import parts
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load, required_bytes
from tests.weights.checkpoints import write, write_sharded
from tests.weights.test_load import Strict

if TYPE_CHECKING:
    from pathlib import Path

    from infd.kernels.cpu.library import Library
    from infd.weights.parts import FilePart

FORMS = {"bfloat16": Matrices, "int8": Int8, "int4": Int4}
STACKED = {"q": 130, "k": 70, "v": 1}  # rows; neither ends where a panel does
EXPERTS = {"gate.0": 40, "up.0": 40, "gate.1": 40, "up.1": 40}


class Model:
    """Matrices of a form, those of two experts, a norm, and a scalar."""

    unread: frozenset[str] = frozenset()

    def __init__(self, form: str, library: Library, inputs: int) -> None:
        of = FORMS[form](library).form
        firsts = (0, 130, 200)
        stacked = tuple(Source(f"{n}", (r, inputs), f) for (n, r), f in zip(STACKED.items(), firsts, strict=True))
        self.parameters = [
            Matrix(of(201, inputs, torch.bfloat16), stacked),
            MatrixStack(
                of(80, inputs, torch.bfloat16),
                2,
                80,
                tuple(Source(name, (rows, inputs), 40 * at) for at, (name, rows) in enumerate(EXPERTS.items())),
            ),
            Parameter((inputs,), torch.bfloat16, (Source("norm", (inputs,)),)),
            Parameter((), torch.bfloat16, (Source("scale", ()),)),
            Parameter((2, 3), torch.float32, (Source("converted", (2, 3)),)),
        ]


def stored(inputs: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    matrices = {name: torch.randn(rows, inputs).to(dtype) for name, rows in (STACKED | EXPERTS).items()}
    others = {"norm": torch.randn(inputs), "scale": torch.tensor(3.0), "converted": torch.randn(2, 3)}
    return matrices | {name: tensor.to(torch.bfloat16) for name, tensor in others.items()}


class Noting:
    """Fills, and records its arguments."""

    def __init__(self, fill: Fill) -> None:
        self.parts: list[FilePart] = []
        self._fill = fill

    def __call__(self, given, report) -> int | None:
        self.parts += given
        return self._fill(given, report)


def filled(model: Model, directory: Path, natively: Noting | None) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    arena, seen = Strict(required_bytes(model)), []
    with Checkpoint(directory) as checkpoint:
        load(model, checkpoint, arena, lambda *progress: seen.append(progress), natively)
    return arena.memory, seen


@pytest.mark.parametrize("part_bytes", [1, 2**12, 2**19])
@pytest.mark.parametrize("inputs", [33, 96])
@pytest.mark.parametrize("form", FORMS)
def test_native_code_fills_the_bytes_that_python_places(
    tmp_path, monkeypatch, library: Library, form, inputs, part_bytes
):
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    written = stored(inputs)
    shards = {"1.safetensors": {"k": written.pop("k")}, "2.safetensors": written}
    directory = write_sharded(tmp_path, shards)
    expected, _ = filled(Model(form, library, inputs), directory, None)
    natively = Noting(Fill(library))
    model = Model(form, library, inputs)

    found, seen = filled(model, directory, natively)

    assert found.equal(expected)
    assert filled(model, directory, Noting(Fill(library)))[0].equal(expected), "loaded again, into other memory"
    total = seen[0][1]
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert sum(part.bytes for part in natively.parts) == total - 2 * 3 * 2  # the one that is converted
    packed = [part for part in natively.parts if part.pack is not None]
    assert sum(part.rows for part in packed) == 201 + 2 * 80
    assert all(part.first % 64 == 0 or part.first in (130, 200, 40) for part in packed)


def test_rows_of_a_type_that_is_converted_are_placed_by_python(tmp_path, library: Library):
    directory = write(tmp_path, stored(32, torch.float16))
    expected, _ = filled(Model("int8", library, 32), directory, None)
    natively = Noting(Fill(library))

    found, _ = filled(Model("int8", library, 32), directory, natively)

    assert found.equal(expected)
    assert [part.pack for part in natively.parts] == [None, None]


def test_it_reports_between_turns_and_goes_on_where_it_stopped(tmp_path, monkeypatch, library: Library):
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    directory = write(tmp_path, {"w": torch.arange(100, dtype=torch.uint8).view(torch.bfloat16)})
    content = torch.zeros(100, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reported: list[int] = []
    try:
        with Checkpoint(directory) as checkpoint:
            given = list(parts.copied(checkpoint.tensors["w"], content))
            assert Fill(library, turn_s=0.0)(given, reported.append) is None
    finally:
        torch.set_num_threads(threads)
    assert content.tolist() == list(range(100))
    assert reported == [1] * 100


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path, library: Library):
    directory = write(tmp_path, stored(32))
    model = Model("bfloat16", library, 32)
    with Checkpoint(directory) as checkpoint:
        os.truncate(directory / "model.safetensors", 4096)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: the file became shorter"):
            load(model, checkpoint, Strict(required_bytes(model)), natively=Fill(library))


def test_an_error_of_the_system_is_raised(tmp_path, library: Library):
    content = torch.zeros(8, dtype=torch.uint8)
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            Fill(library)([parts.FilePart(directory, 0, 8, None, content.data_ptr())], lambda _: None)
    finally:
        os.close(directory)


def test_nothing_to_fill_is_nothing_to_do(library: Library):
    assert Fill(library)([], lambda _: None) is None
