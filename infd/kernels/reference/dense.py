"""The families that look at one token at a time. Each is as few torch calls as it can be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor


class Linear:
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)


class Embedding:
    def __call__(self, tokens: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(tokens, weight)


class Norm:
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)  # computes in float32 whatever x is

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return self.rms_norm(stream, weight, eps), stream


class Rope:
    def __call__(self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = table[positions, None].unbind(2)  # each [T, 1, D / 2]
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


class Activation:
    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
