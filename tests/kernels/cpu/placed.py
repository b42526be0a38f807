"""A weight placed in a form, as loading does."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.matrices import Matrices


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Placed:
    """A form, and the tensor that stores the weight.

    cuts  row boundaries of the parts that are placed one by one, the last part first
    """

    def __init__(
        self,
        matrices: Matrices,
        weight: Tensor,
        activations: torch.dtype = torch.bfloat16,
        *,
        cuts: tuple[int, ...] | None = None,
    ) -> None:
        self.form = matrices.form(*weight.shape, activations)
        self.kept = torch.empty(self.form.shape, dtype=self.form.dtype)
        self.kept.view(torch.uint8).fill_(255)  # memory is arbitrary before it is placed
        ends = cuts or (0, len(weight))
        for first, last in reversed(list(itertools.pairwise(ends))):
            self.form.place(self.kept, first, weight[first:last])

    def multiply(self, x: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> Tensor:
        return self.form.multiply(x, self.kept, bias, wide=wide)

    def look_up(self, tokens: Tensor) -> Tensor:
        return self.form.look_up(tokens, self.kept)
