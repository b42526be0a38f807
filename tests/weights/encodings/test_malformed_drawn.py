"""Drawn malformed checkpoints are refused with file, tensor and reason, and take no more memory than their files."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.select import select
from infd.models import registry
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import check
from tests.kernels.paging import CPU
from tests.thorough import SOAK, among
from tests.weights.encodings.malformed import Drawing
from tests.weights.encodings.starting import starting

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = 2**20  # bytes that a refusal may take besides the file's size, and that tracemalloc sees
RESIDENT = 2**23  # the same of a process, where pages of allocations are not returned at once


def refused(path: Path) -> str:
    """Return why a checkpoint is refused before its weights are read; "" if it is not."""
    try:
        with Checkpoint(path) as checkpoint:
            model = registry.build(
                checkpoint.config,
                select(CPU, torch.float32),
                dtype=torch.float32,
                device=CPU,
                max_len=64,
                stored=checkpoint.tensors,
            )
            check(model, checkpoint)
    except CheckpointError as error:
        return f"{path}: {error}"
    return ""


def size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(each.stat().st_size for each in path.iterdir())


@pytest.mark.exhaustive
def test_drawn_malformed_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    drawing = Drawing(tmp_path, seed=20)
    for number in range(0, 48, 9):
        assert not refused(drawing.intact(number))
    tracemalloc.start()
    try:
        for number in range(among(20, 60, 1000)):
            path, told, names = drawing.variant(number)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            why = refused(path)
            taken = tracemalloc.get_traced_memory()[1] - before
            assert why, f"variant {number}: {told}: accepted"
            assert len(why) < 10_000
            assert all(name in why for name in names), f"variant {number}: {told}: {why}"
            assert taken < size(path) + MEMORY, f"variant {number}: {told}: {taken} bytes"
    finally:
        tracemalloc.stop()


@pytest.mark.exhaustive
def test_a_start_with_a_drawn_malformed_checkpoint_exits_with_78_and_says_why(tmp_path: Path) -> None:
    """In a process each, with all that a start does before it reads weights."""
    drawing = Drawing(tmp_path, seed=21)
    with starting(tmp_path) as process:
        most = process.start(drawing.taller()).memory  # refused last, when all that reads weights is imported
        for number in range(1000 if SOAK else 3):
            path, told, names = drawing.variant(number if SOAK else 17 * number)
            ended = process.start(path)
            assert ended.code == 78, f"variant {number}: {told}: {ended}"
            assert "Traceback" not in ended.said, f"variant {number}: {told}: {ended}"
            assert "CRITICAL" in ended.said, told
            assert all(name in ended.said for name in names), f"variant {number}: {told}: {ended}"
            assert ended.memory < most + size(path) + RESIDENT, f"variant {number}: {told}: {ended}"
