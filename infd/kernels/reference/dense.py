"""The families norm, rope, activation, linear, vocabulary and stack in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from torch.nn import functional as F

from infd.kernels.families.matrices import LEAST_ROWS
from infd.kernels.families.norm import Norm as NormFamily
from infd.kernels.families.rope import Rope as RopeFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from infd.groups import Groups
    from infd.kernels.families.stack import Stacked, StepBuffers, StepMemory
    from infd.kernels.recipe import DecoderRecipe, EmbeddingsRecipe, EncoderLayerRecipe, LayerRecipe


class Plain(Struct, frozen=True):
    """A matrix in the checkpoint's layout."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    least_rows: int = LEAST_ROWS

    @property
    def wide(self) -> torch.dtype:
        return self.dtype

    @property
    def quantizes(self) -> None:
        """None: inputs are multiplied as floats."""

    def rows(self, storage: Tensor, first: int, count: int) -> Tensor | None:
        return storage.narrow(0, first, count)

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        storage.narrow(0, first, rows.shape[0]).copy_(rows)

    def multiply(self, x: Tensor, storage: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        return F.linear(x, storage, bias)

    def look_up(self, tokens: Tensor, storage: Tensor) -> Tensor:
        return F.embedding(tokens, storage)


class Matrices:
    """Implements families.matrices.Matrices over unquantized weights."""

    numbers = None

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> Plain:
        return Plain((outputs, inputs), dtype)


class RoundedMatrix(Plain, frozen=True, kw_only=True):
    """A matrix of numbers that `round` makes of the checkpoint's rows; all are stored in `dtype`."""

    round: Callable[[Tensor], Tensor]

    def rows(self, storage: Tensor, first: int, count: int) -> None:
        """Return None: rounded rows differ from the checkpoint's."""

    def place(self, storage: Tensor, first: int, rows: Tensor) -> None:
        super().place(storage, first, self.round(rows))


class Rounded(ABC):
    """Implements families.matrices.Matrices over weights that are quantized, then decoded again."""

    numbers: tuple[int, str]

    @abstractmethod
    def round(self, rows: Tensor) -> Tensor:
        """Quantize and decode rows [n, in]; return float32."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype) -> RoundedMatrix:
        return RoundedMatrix((outputs, inputs), dtype, round=self.round)


class Decoded:
    """Implements families.matrices.Packed without forms: loading decodes all matrices to the activations' dtype."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: Groups) -> str:
        return ""


class Norm(NormFamily):
    """Implements families.norm.Norm."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        if offset:  # in float32: weight + offset is near 1, where bfloat16 would lose most bits of a small weight
            return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)  # computes in float32 for any dtype of x

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        stream = x + residual
        return self.rms_norm(stream, weight, eps, offset), stream


class Rope(RopeFamily):
    """Implements families.rope.Rope."""

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        cos, sin = table[positions, None].unbind(2)  # each [T, 1, R / 2]
        return self._rotate(q, cos, sin, interleaved), self._rotate(k, cos, sin, interleaved)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        turned, rest = x.tensor_split([2 * cos.shape[-1]], dim=-1)
        pairs = turned.float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
        axis = -1 if interleaved else -2
        first, second = pairs.unbind(axis)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis).flatten(-2).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Stack:
    """Implements families.stack.Stack and families.encoder.EncoderStack: every layer runs its own code."""

    def decoder(self, layers: Stacked, ends: DecoderRecipe, memory: StepMemory, buffers: StepBuffers) -> None:
        return None

    def build(
        self, layers: Sequence[LayerRecipe] | Sequence[EncoderLayerRecipe], embeddings: EmbeddingsRecipe | None = None
    ) -> None:
        return None


class Activation:
    """Implements families.activation.Activation."""

    def silu_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)
