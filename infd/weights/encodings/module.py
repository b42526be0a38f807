"""The stored tensors of one module. A format takes them by suffix, and states the dtypes and shapes that it accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from infd.errors import CheckpointError
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.weights.stored import StoredTensor

FLOATS = ("BF16", "F16", "F32")
PLAIN = (*FLOATS, "F64")

Shape = tuple[int, ...]


class Module:
    """The stored tensors of module `name`, by suffix: the rest of a tensor's name after the module's name."""

    def __init__(self, name: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.name = name
        self._tensors = tensors

    def __contains__(self, suffix: str) -> bool:
        return suffix in self._tensors

    def is_plain(self) -> bool:
        """Return whether the module's only tensor is a weight of floating-point numbers that are not encoded."""
        return self._tensors.keys() <= {".weight"} and (
            ".weight" not in self or self._tensors[".weight"].dtype in PLAIN
        )

    def dtype(self, suffix: str) -> str:
        """Return a tensor's dtype; "" if the module does not have the tensor."""
        return self._tensors[suffix].dtype if suffix in self._tensors else ""

    def take(self, suffix: str, dtypes: Sequence[str], *shapes: Shape) -> StoredTensor:
        """Return the tensor with this suffix.

        Raises CheckpointError if it is missing, its dtype is not in `dtypes`, or it has none of `shapes`. In a shape,
        -1 means any size except 0. Without `shapes`, every shape is accepted.
        """
        stored = self._tensors.get(suffix)
        if stored is None:
            present = next(iter(self._tensors.values()))
            file = present.file.path.name
            raise CheckpointError(f"{self.name}{suffix}: missing beside {present.name} in {file}")
        if stored.dtype not in dtypes:
            self.refuse(stored, f"expected {' or '.join(dtypes)}, found {stored.dtype}")
        if shapes and not any(_fits(stored.shape, shape) for shape in shapes):
            self.refuse(stored, f"expected {' or '.join(map(_written, shapes))}, found {list(stored.shape)}")
        return stored

    def find(self, suffix: str, dtypes: Sequence[str], *shapes: Shape) -> StoredTensor | None:
        """Return the tensor as `take` does; None if the module does not have the tensor."""
        return self.take(suffix, dtypes, *shapes) if suffix in self._tensors else None

    def present(self, *suffixes: str) -> tuple[StoredTensor, ...]:
        """Return the tensors with these suffixes that the module has."""
        return tuple(self._tensors[suffix] for suffix in suffixes if suffix in self._tensors)

    def groups(self, count: int, size: int | None, stored: StoredTensor) -> int:
        """Return the number of groups of `size` inputs into which `count` inputs are divided; size None or -1: 1.

        Raises CheckpointError, which names tensor `stored`, if `size` is another number below 1, or if `count` exceeds
        `size` and is not a multiple of `size`.
        """
        if size is None or size == -1:
            return 1
        if size < 1 or (count % size and count > size):
            self.refuse(stored, f"{count} inputs are not divided into groups of {size}")
        return ceil_div(count, size)

    def refuse(self, stored: StoredTensor, reason: str) -> NoReturn:
        raise CheckpointError(f"{stored.file.path.name}: {stored.name}: {reason}")


def _fits(found: Shape, wanted: Shape) -> bool:
    return len(found) == len(wanted) and all(
        size == want or (want == -1 and size > 0) for size, want in zip(found, wanted, strict=True)
    )


def _written(shape: Shape) -> str:
    return f"[{', '.join('any' if size == -1 else str(size) for size in shape)}]"
