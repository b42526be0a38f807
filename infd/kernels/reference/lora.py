"""LoRA in plain torch: one product with A and one with each B, for each adapter in the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from infd.kernels.families.adapters import LowRank
    from infd.kernels.families.host import Upload


class Lora:
    """Implements families.adapters.Lora."""

    def add(self, y: Tensor, x: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None) -> None:
        for rows, low in groups:
            _spread(y, rows, F.linear(x.index_select(0, rows), low.a), low)

    def add_rows(
        self, y: Tensor, tokens: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None
    ) -> None:
        for rows, low in groups:
            _spread(y, rows, F.embedding(tokens.index_select(0, rows), low.a), low)

    def captured(self, size: int, device: torch.device) -> None:
        """Return None: the host groups each step's rows by adapter, so steps cannot be captured."""


def _spread(y: Tensor, rows: Tensor, shrunk: Tensor, low: LowRank) -> None:
    """Add each part's ranks of `shrunk` [n, R], times the part's B transposed, to the part's outputs of y[rows]."""
    for b, rank, output in low.parts:
        added = F.linear(shrunk[:, rank : rank + b.shape[1]], b)
        y[:, output : output + b.shape[0]].index_add_(0, rows, added.to(y.dtype))
