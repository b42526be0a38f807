"""What a model declares of its weights before any of them has storage.

A parameter says which checkpoint tensors fill which of its rows; loading does
the rest. Layers declare theirs on a Blueprint while the model is built, so the
list of all parameters is complete when the last layer exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    import torch

    from infd.kernels.ops import Ops


class Source(Struct, frozen=True):
    """One checkpoint tensor: its name, its shape, and the first row of the parameter that it fills."""

    name: str
    shape: tuple[int, ...]
    row: int = 0


class Parameter:
    """One tensor of the model. `tensor` is set when the weights are loaded; reading it earlier is an AttributeError."""

    __slots__ = ("dtype", "shape", "sources", "tensor")

    tensor: torch.Tensor

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sources: tuple[Source, ...]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.sources = sources


class Blueprint(Struct, frozen=True, kw_only=True):
    """What layers need while they are built.

    max_len     the longest sequence, for tables by position
    stored      the names in the checkpoint, which tell how it was saved
    parameters  those declared so far, in order of use
    """

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    max_len: int
    stored: Collection[str] = frozenset()
    parameters: list[Parameter] = field(default_factory=list)

    def declare(self, rows: Mapping[str, int], columns: tuple[int, ...] = ()) -> Parameter:
        """Declare a parameter [sum of rows, *columns] that stacks checkpoint tensors, named with their rows."""
        sources = []
        row = 0
        for name, count in rows.items():
            sources.append(Source(name, (count, *columns), row))
            row += count
        parameter = Parameter((row, *columns), self.dtype, tuple(sources))
        self.parameters.append(parameter)
        return parameter
