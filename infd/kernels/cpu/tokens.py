"""The elementwise families (norm, rope, activation) in C++: `native/tokens.cpp`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import FLOAT, INT, POINTER, Library
from infd.kernels.families.norm import Norm as NormFamily
from infd.kernels.families.rope import Rope as RopeFamily

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class Norm(NormFamily):
    """Implements families.norm.Norm."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        rows = (INT, INT, INT)
        self._norm = library.kernel("rms_norm", INT, POINTER, INT, POINTER, *rows, POINTER, FLOAT, FLOAT)
        self._add_norm = library.kernel(
            "add_rms_norm", INT, POINTER, POINTER, POINTER, POINTER, INT, INT, POINTER, FLOAT, FLOAT
        )
        self._center = library.kernel("layer_norm", INT, POINTER, POINTER, INT, INT, POINTER, POINTER, FLOAT)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        rows, stride, heads = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._norm(
            x.dtype is torch.bfloat16,
            rows.data_ptr(),
            stride,
            out.data_ptr(),
            x.shape[0],
            heads,
            x.shape[-1],
            weight.data_ptr(),
            eps,
            offset,
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        out, stream = torch.empty_like(x), torch.empty_like(x)
        self._add_norm(
            x.dtype is torch.bfloat16,
            x.data_ptr(),
            residual.data_ptr(),
            stream.data_ptr(),
            out.data_ptr(),
            x.numel() // x.shape[-1],
            x.shape[-1],
            weight.data_ptr(),
            eps,
            offset,
        )
        return out, stream

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        out, shift = torch.empty_like(x), None if bias is None else bias.data_ptr()
        self._center(x.dtype is torch.bfloat16, x.data_ptr(), out.data_ptr(), *x.shape, weight.data_ptr(), shift, eps)
        return out


class Rope(RopeFamily):
    """Implements families.rope.Rope."""

    def __init__(self, library: Library | None = None) -> None:
        self._rotate = (library or Library()).kernel(
            "rope", INT, POINTER, INT, POINTER, INT, INT, INT, POINTER, POINTER, INT, INT
        )

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        return self._turn(q, positions, table, interleaved), self._turn(k, positions, table, interleaved)

    def _turn(self, x: Tensor, positions: Tensor, table: Tensor, interleaved: bool) -> Tensor:
        rows, stride, heads = _rows(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._rotate(
            x.dtype is torch.bfloat16,
            rows.data_ptr(),
            stride,
            out.data_ptr(),
            x.shape[0],
            heads,
            x.shape[-1],
            positions.data_ptr(),
            table.data_ptr(),
            2 * table.shape[-1],
            interleaved,
        )
        return out


class Activation:
    """Implements families.activation.Activation."""

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        arguments = (INT, POINTER, INT, POINTER, INT, INT)
        self._silu = library.kernel("silu_mul", *arguments)
        self._gelu = library.kernel("gelu_tanh_mul", *arguments)

    def silu_mul(self, x: Tensor) -> Tensor:
        return _gate(self._silu, x)

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        return _gate(self._gelu, x)


def _gate(kernel: Callable[..., None], x: Tensor) -> Tensor:
    rows, stride, _ = _rows(x)
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
    kernel(x.dtype is torch.bfloat16, rows.data_ptr(), stride, out.data_ptr(), *out.shape)
    return out


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Return x [T, n] or [T, heads, n], the stride between its tokens, and the number of heads, 1 for [T, n].

    x is copied if the elements of a token are not contiguous.
    """
    inner = x.shape[1:]
    packed = (1,) if len(inner) == 1 else (inner[1], 1)
    if x.stride()[1:] != packed:
        x = x.contiguous()
    return x, x.stride(0), 1 if len(inner) == 1 else inner[0]
