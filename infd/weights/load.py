"""Fill a model's parameters from a checkpoint: nothing missing, nothing left over.

All problems are found before anything is read, and named together.
"""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from infd.errors import CheckpointError
from infd.rounding import round_up
from infd.weights.formats.plain import DTYPES, PlainReader

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    import torch
    from torch import Tensor

    from infd.weights.checkpoint import Checkpoint, StoredTensor

ALIGNMENT = 64  # bytes: a cache line, and the widest load of a CPU; enough for a GPU's kernels too
PROBLEMS_SHOWN = 20

NO_WEIGHT = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # tables that old checkpoints saved along


class Arena(Protocol):
    """Where weights live."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor of the arena's memory, at a multiple of ALIGNMENT bytes."""


class Source(Protocol):
    """A checkpoint tensor that fills a parameter from `row` on."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def row(self) -> int: ...


class Parameter(Protocol):
    """A tensor that a model declares."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def sources(self) -> Sequence[Source]: ...

    def rows(self, first: int, count: int) -> Tensor | None:
        """Return the part of `tensor` that lies as these rows do in a checkpoint, or None: then they are placed."""

    def place(self, first: int, rows: Tensor) -> None:
        """Make these, of any floating-point type, the rows from `first` on."""


class Loadable(Protocol):
    """What loading knows of a model."""

    @property
    def parameters(self) -> Sequence[Parameter]: ...
    @property
    def unread(self) -> Container[str]: ...


class _Place(NamedTuple):
    """Where one checkpoint tensor goes."""

    parameter: Parameter
    source: Source

    def read(self, reader: PlainReader, stored: StoredTensor) -> None:
        first, count = self.source.row, self.source.shape[0] if self.source.shape else 1
        rows = self.parameter.rows(first, count)
        if rows is None:
            for start, chunk in reader.rows(stored):
                self.parameter.place(first + start, chunk)
        else:
            reader.read(stored, rows)


Places = dict[str, _Place]


def required_bytes(model: Loadable) -> int:
    """Return how large an arena must be to hold every parameter."""
    return sum(round_up(_bytes(parameter), ALIGNMENT) for parameter in model.parameters)


def load(
    model: Loadable, checkpoint: Checkpoint, arena: Arena, progress: Callable[[int, int], None] | None = None
) -> None:
    """Give every parameter its storage and its numbers.

    progress  called with (bytes read, bytes to read), at 0 and every few megabytes

    Raises CheckpointError, before anything is taken from the arena, if checkpoint and model do not fit each other.
    """
    places = check(model, checkpoint)
    for parameter in model.parameters:
        parameter.tensor = arena.take(parameter.shape, parameter.dtype)
    fill(places, checkpoint, progress)


def check(model: Loadable, checkpoint: Checkpoint) -> Places:
    """Return where each tensor of a checkpoint goes. Raises CheckpointError if the two do not fit each other."""
    places = {source.name: _Place(parameter, source) for parameter in model.parameters for source in parameter.sources}
    problems = list(_problems(model, places, checkpoint))
    if problems:
        more = [f"and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
        raise CheckpointError("\n  ".join([f"{checkpoint.directory}:", *problems[:PROBLEMS_SHOWN], *more]))
    return places


def fill(places: Places, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> None:
    """Read every tensor to where it goes, whatever was there before. Raises CheckpointError where a file ends early."""
    total = sum(checkpoint.tensors[name].bytes for name in places)
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    report(0)
    reader = PlainReader(report)
    for stored in checkpoint.stored_order():
        if stored.name in places:
            places[stored.name].read(reader, stored)


def _problems(model: Loadable, places: Places, checkpoint: Checkpoint) -> Iterator[str]:
    for name, place in places.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            yield f"{name}: missing, expected {list(place.source.shape)}"
        elif stored.shape != place.source.shape:
            found = f"found {list(stored.shape)} in {stored.file.path.name}"
            yield f"{name}: expected {list(place.source.shape)}, {found}"
        elif stored.dtype not in DTYPES:
            yield f"{name}: expected one of {', '.join(DTYPES)}, found {stored.dtype} in {stored.file.path.name}"
    for name, stored in checkpoint.tensors.items():
        if name not in places and name not in model.unread and not NO_WEIGHT.search(name):
            yield f"{name}: left over, {stored.dtype} {list(stored.shape)} in {stored.file.path.name}"


def _bytes(parameter: Parameter) -> int:
    return prod(parameter.shape) * parameter.dtype.itemsize
