"""Low-rank adapters, by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from infd.kernels.families.host import Fill, Upload


ALIGNED = 8  # numbers: on a GPU, rows of an adapter's matrices begin at multiples of so many


class LowRank(NamedTuple):
    """What one adapter adds to a product, or to a table's rows: x A B, of low rank. Its scale is in B already.

    On a GPU their rows begin at multiples of ALIGNED numbers, with zeros between, so that several are read at once.

    a      [R, in]: the ranks of all parts, stacked; a table's is [in, R], looked up by token
    parts  one for each of the product's modules that the adapter changes
    """

    a: Tensor
    parts: Sequence[LowRankPart]


class LowRankPart(NamedTuple):
    """One module of a product: b [out, r], where its r ranks begin in `a`, and where its outputs begin in y."""

    b: Tensor
    rank: int
    output: int


class Lora(Protocol):
    """Adapters by row. Rows that no group names are left exactly as they are.

    groups  the rows [n] int64 of each adapter, ascending, and what it adds; no row stands in two
    upload  copies to the device what is worked out for a step; without one, it is copied as it lies
    """

    def add(self, y: Tensor, x: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None) -> None:
        """Add x A^T B^T to y [T, out], in place, x [T, in]; accumulated in x's dtype or a better one.

        y is of x's dtype, which is that of A and B, or float32.
        """

    def add_rows(
        self, y: Tensor, tokens: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None
    ) -> None:
        """Add A[token] B^T to y [T, out], in place, tokens [T] int64."""

    def lasting(self, size: int, device: torch.device) -> LastingLora | None:
        """Return what adds to steps of `size` rows that are captured; None where that cannot be."""


class SlotWeights(Protocol):
    """What the slots of a device add to one product, or to a table's rows, where captured steps find it."""

    def hold(self, held: Sequence[LowRank | None], fill: Fill) -> bool:
        """Take in what the slots hold now, in the same memory; False, and nothing, where ranks have outgrown it."""


class LastingLora(Protocol):
    """Adapters by row, of steps of one size whose tensors are filled anew before each."""

    def weigh(
        self, held: Sequence[LowRank | None], outputs: Sequence[int], *, table: bool, upload: Upload
    ) -> SlotWeights:
        """Return what these slots, the first one being 1, add to one product or table.

        held     one of them, at least, adds something
        outputs  of the product's modules
        """

    def refill(self, slots: Sequence[int], fill: Fill) -> None:
        """Be told which slot each row of the next step wants, 0 for none, before what is captured is replayed."""

    def add(self, y: Tensor, x: Tensor, weights: Any) -> None:
        """As Lora's, with what `weigh` returned."""

    def add_rows(self, y: Tensor, tokens: Tensor, weights: Any) -> None:
        """As Lora's, likewise."""
