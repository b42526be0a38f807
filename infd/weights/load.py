"""Fill a model's parameters from a checkpoint.

Missing, unknown and misshapen tensors are reported together in one error, before
weights are read.
"""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from infd.errors import CheckpointError
from infd.rounding import round_up
from infd.weights import parts
from infd.weights.encodings.integers import why_not
from infd.weights.encodings.rows import read
from infd.weights.formats.encoded import EncodedReader
from infd.weights.formats.plain import DTYPES, PlainReader
from infd.weights.views import EncodedView, PlainView, bytes_read, is_slice, sliced

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    import torch
    from torch import Tensor

    from infd.groups import GroupedRows, Groups
    from infd.input_scheme import InputScheme
    from infd.weights.checkpoint import Checkpoint
    from infd.weights.parts import FilePart, Fill, Packing
    from infd.weights.stored import EncodedTensor, StoredTensor
    from infd.weights.views import View

ALIGNMENT = 64  # bytes; the size of a cache line and of a CPU's widest load, and sufficient for GPU kernels
PROBLEMS_SHOWN = 20

# Tables that old checkpoints contain, and that infd computes itself.
NO_WEIGHT = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


class Arena(Protocol):
    """A memory range from which weights are allocated."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor in the arena, aligned to ALIGNMENT bytes."""


class Source(Protocol):
    """A checkpoint tensor of `shape`; the rows of its `view`, or all, fill `rows` rows of a parameter from `row` on."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def row(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def view(self) -> View | None: ...


class Rounding(Protocol):
    """The rounding of a product's inputs. stored: whether the checkpoint's scheme says so."""

    @property
    def scheme(self) -> InputScheme: ...
    @property
    def stored(self) -> bool: ...
    def place(self, row: int, scale: float, zero: float) -> None:
        """Store the scale and zero point of the stacked matrix whose first row is `row`. Raises ValueError."""


class Parameter(Protocol):
    """A tensor that a model declares."""

    tensor: Tensor

    @property
    def inputs(self) -> Rounding | None:
        """How inputs are rounded before products with the parameter; None: they are not."""

    @property
    def input_scheme(self) -> InputScheme | None:
        """How inputs are quantized, by `inputs` or by the parameter's form; None: they are not."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def sources(self) -> Sequence[Source]: ...

    def rows(self, first: int, count: int) -> Tensor | None:
        """Return a view of rows [first, first + count), if checkpoint rows are stored unchanged; None: use `place`."""

    def packing(self, first: int, dtype: torch.dtype | str) -> tuple[Packing, int] | None:
        """Return the packing by which native code stores rows of `dtype` from row `first` on; None: use `place`.

        The integer is the packing's number of the row. dtype: a string is a type of GGUF's blocks, whose groups must
        be `groups()`; None then means: use `place_groups`.
        """

    @property
    def kept(self) -> bool:
        """Whether the parameter can store only integers and scales, through `place_groups`."""

    @property
    def refused(self) -> str:
        """Why the form does not store encoded tensors unchanged; "" if it does, or if the reason is not known."""

    def groups(self) -> Groups | None:
        """Return which integers and scales `place_groups` can store unchanged; None: it can store none."""

    def place_groups(self, first: int, rows: GroupedRows) -> None:
        """Store rows of integers and scales, starting at row `first`."""

    def place(self, first: int, rows: Tensor) -> None:
        """Convert floating-point `rows` to the parameter's form and store them, starting at row `first`."""


class Loadable(Protocol):
    """The attributes of a model that loading reads.

    parameters  tensors to fill
    unread      checkpoint tensors that the model does not use
    """

    @property
    def parameters(self) -> Sequence[Parameter]: ...
    @property
    def unread(self) -> Container[str]: ...


S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)


class _Reader(Protocol[S_contra]):
    """A reader of one kind of tensors; see PlainReader and EncodedReader."""

    def read(self, stored: S_contra, destination: Tensor) -> None: ...
    def rows(self, stored: S_contra) -> Iterator[tuple[int, Tensor]]: ...


class _Place(NamedTuple):
    """The destination of one checkpoint tensor."""

    parameter: Parameter
    source: Source

    def read(self, reader: _Reader[S], stored: S) -> None:
        first = self.source.row
        rows = self.parameter.rows(first, self.source.rows)
        if rows is None:
            for start, chunk in reader.rows(stored):
                self.parameter.place(first + start, chunk)
        else:
            reader.read(stored, rows)

    def decode(self, reader: EncodedReader | EncodedView, stored: EncodedTensor) -> str:
        """Read an encoded matrix. Return "kept" if its integers and scales are stored unchanged, else "decoded".

        The reason for decoding, if it is known, follows "decoded". If the checkpoint's scheme quantizes inputs, the
        scheme that the product applies follows.
        """
        inputs = self._place_inputs(stored)
        form = self.parameter.groups()
        reason = self.parameter.refused if form is None else why_not(stored, form)
        if form is None or reason:
            self.read(reader, stored)
            return (f"decoded: {reason}" if reason else "decoded") + inputs
        for start, rows in reader.integers(stored, form):
            self.parameter.place_groups(self.source.row + start, rows)
        return f"kept{inputs}"

    def _place_inputs(self, stored: EncodedTensor) -> str:
        """Store the scale by which the checkpoint quantizes inputs; return how inputs are quantized, for operators."""
        if (wanted := stored.inputs) is None:
            return ""
        rounding = self.parameter.inputs
        if rounding is not None and rounding.scheme.static and wanted.scale is not None:
            scale = read(wanted.scale).float().item()
            if wanted.inverse and scale:
                scale = 1 / scale
            zero = 0.0 if wanted.zero is None else read(wanted.zero).float().item()
            try:
                rounding.place(self.source.row, scale, zero)
            except ValueError as error:
                raise CheckpointError(f"{wanted.scale.file.path}: {wanted.scale.name}: {error}") from error
        done = self.parameter.input_scheme
        if done == wanted.scheme:
            return f", inputs {done}"
        return f", inputs {done or 'not quantized'} instead of {wanted.scheme}"

    def encoded_parts(self, stored: EncodedTensor) -> list[FilePart] | None:
        """Return the parts of an encoded matrix for native code to keep; None if only Python can read the matrix."""
        view = self.source.view
        if view is not None and not is_slice(view):
            return None
        first = 0 if view is None else view.index * stored.shape[1] + view.first
        rows = stored.encoding.rows(first, self.source.rows)
        if rows is None or stored.packed() != self.parameter.groups():
            return None
        found = self.parameter.packing(self.source.row, rows.tensor.dtype)
        return None if found is None else list(parts.packed(rows.tensor, *found, head=rows.head))

    def why_not_kept(self, stored: StoredTensor | EncodedTensor) -> str:
        """Return why a tensor cannot be stored: the parameter can store only integers, or rounds inputs otherwise.

        Returns "" if it can be stored.
        """
        rounding, wanted = self.parameter.inputs, stored.inputs
        if rounding is not None and rounding.stored and (wanted is None or wanted.scheme != rounding.scheme):
            return f"inputs are quantized as {rounding.scheme}, its inputs {wanted.scheme if wanted else 'are not'}"
        if not self.parameter.kept:
            return ""
        form = self.parameter.groups()
        assert form is not None
        return why_not(stored, form)

    def parts(self, stored: StoredTensor) -> list[FilePart] | None:
        """Return the parts of the tensor for native code to read; None if only Python can read the tensor."""
        first, dtype = self.source.row, DTYPES[stored.dtype]
        if (found := self.parameter.packing(first, dtype)) is not None:
            return list(parts.packed(stored, *found))
        rows = self.parameter.rows(first, self.source.rows)
        direct = rows is not None and rows.dtype == dtype and rows.device.type == "cpu"
        return list(parts.copied(stored, rows)) if rows is not None and direct else None


Places = dict[str, list[_Place]]  # the places of a tensor's views, or the place of the whole tensor


def required_bytes(model: Loadable) -> int:
    """Return the arena size for all parameters, in bytes."""
    return sum(round_up(_bytes(parameter), ALIGNMENT) for parameter in model.parameters)


def load(
    model: Loadable,
    checkpoint: Checkpoint,
    arena: Arena,
    progress: Callable[[int, int], None] | None = None,
    natively: Fill | None = None,
) -> Counter[str]:
    """Allocate every parameter in `arena` and read its values. Returns what `fill` returns.

    progress  called with (bytes read, bytes to read): before the first byte is read, then after each chunk; by native
              code, at least every second
    natively  native code that reads the tensors that it supports; None: Python reads all tensors

    Raises CheckpointError: before any allocation if the checkpoint does not match the model, later if a file was
    truncated.
    """
    places = check(model, checkpoint)
    for parameter in model.parameters:
        parameter.tensor = arena.take(parameter.shape, parameter.dtype)
    return fill(places, checkpoint, progress, natively)


def check(model: Loadable, checkpoint: Checkpoint) -> Places:
    """Return the destination of each checkpoint tensor that the model reads.

    Raises CheckpointError, which lists the mismatched tensors, at most PROBLEMS_SHOWN.
    """
    places: Places = {}
    for parameter in model.parameters:
        for source in parameter.sources:
            places.setdefault(source.name, []).append(_Place(parameter, source))
    problems = list(_problems(model, places, checkpoint))
    if problems:
        more = [f"and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
        raise CheckpointError("\n  ".join([f"{checkpoint.directory}:", *problems[:PROBLEMS_SHOWN], *more]))
    return places


def fill(
    places: Places,
    checkpoint: Checkpoint,
    progress: Callable[[int, int], None] | None = None,
    natively: Fill | None = None,
) -> Counter[str]:
    """Read every tensor to its destination, replacing present values. Raises CheckpointError if a file is truncated.

    Returns the numbers of encoded matrices by encoding and by result of `_Place.decode`.
    """
    total = sum(bytes_read(checkpoint.tensors[name], place.source.view) for name in places for place in places[name])
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    report(0)
    plain, encoded = PlainReader(report), EncodedReader(report)
    kept: Counter[str] = Counter()
    given: list[FilePart] = []
    owners: list[StoredTensor] = []
    for stored in checkpoint.stored_order():
        for number, place in enumerate(places.get(stored.name, ())):
            view = place.source.view
            if stored.encoding is not None:
                if natively is not None and (found := place.encoded_parts(stored)) is not None:
                    given += found
                    owners += [stored.encoding.parts[0]] * len(found)
                    how = "kept"
                else:
                    how = place.decode(encoded if view is None else EncodedView(encoded, view), stored)
                kept[f"{stored.encoding.label}, {how}"] += number == 0
            elif view is not None and not is_slice(view):
                place.read(PlainView(plain, view), stored)
            else:
                content = stored if view is None else sliced(stored, view)
                if natively is None or (found := place.parts(content)) is None:
                    place.read(plain, content)
                else:
                    given += found
                    owners += [content] * len(found)
    if natively is not None and (short := natively(given, report)) is not None:
        raise owners[short].file.cut_short()
    return kept


def _problems(model: Loadable, places: Places, checkpoint: Checkpoint) -> Iterator[str]:
    for name, (place, *_) in places.items():
        stored = checkpoint.tensors.get(name)
        if stored is None:
            yield f"{name}: missing, expected {list(place.source.shape)}"
        elif stored.shape != place.source.shape:
            found = f"found {list(stored.shape)} in {stored.file.path.name}"
            yield f"{name}: expected {list(place.source.shape)}, {found}"
        elif stored.dtype not in DTYPES:
            yield f"{name}: expected one of {', '.join(DTYPES)}, found {stored.dtype} in {stored.file.path.name}"
        elif reason := place.why_not_kept(stored):
            yield f"{name}: the weights in memory are kept as another checkpoint stores them; {reason}"
    for name, stored in checkpoint.tensors.items():
        if name not in places and name not in model.unread and not NO_WEIGHT.search(name):
            yield f"{name}: left over, {stored.dtype} {list(stored.shape)} in {stored.file.path.name}"


def _bytes(parameter: Parameter) -> int:
    return prod(parameter.shape) * parameter.dtype.itemsize
