"""LoRA: each row of a step's activations has its own low-rank adapter, or none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from infd.kernels.families.host import Fill, Upload


ALIGNED = 8  # on a GPU, rows of A and B begin at multiples of this many elements


class LowRank(NamedTuple):
    """One adapter's matrices for one product (x A^T B^T) or embedding table (A[token] B^T). B includes the scale.

    On a GPU rows are padded with zeros to multiples of ALIGNED elements, so that loads are vectorized.

    a      [R, in]: the ranks of all parts, stacked; for an embedding table [vocab, R]
    parts  one for each of the product's modules that the adapter changes

    If each of E experts has such a product, A is [E, R, in], and B of a part [E, out, r].
    """

    a: Tensor
    parts: Sequence[LowRankPart]


class LowRankPart(NamedTuple):
    """One module of a product, for example q_proj of the stacked q, k and v.

    b       [out, r]
    rank    index of the module's first rank in `a`
    output  index of the module's first output in y
    """

    b: Tensor
    rank: int
    output: int


class Replacement(NamedTuple):
    """One adapter's own weight [out, in] and bias [out], float32, of a layer after pooling."""

    weight: Tensor
    bias: Tensor | None


Groups: TypeAlias = "Sequence[tuple[Tensor, LowRank]]"  # see Lora


class Lora(Protocol):
    """LoRA with at most one adapter for each row. Rows in no group are bitwise unchanged.

    groups  each adapter's rows [n] int64, ascending, and the adapter's matrices; no row is in two groups
    upload  copies tables that the host computes for a step to the device; None: torch copies them
    """

    def add(self, y: Tensor, x: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None) -> None:
        """Add x A^T B^T to y [T, out], in place; x [T, in]; accumulated in x's dtype or a wider dtype.

        x, A and B share a dtype; y has the same dtype, or float32.
        """

    def add_rows(
        self, y: Tensor, tokens: Tensor, groups: Sequence[tuple[Tensor, LowRank]], upload: Upload | None = None
    ) -> None:
        """Add A[token] B^T to y [T, out], in place; tokens [T] int64."""

    def captured(self, size: int, device: torch.device) -> CapturedLora | None:
        """Return LoRA for captured steps of `size` rows; None if the implementation cannot be captured."""


class SlotWeights(Protocol):
    """All device slots' low-rank matrices for one product or embedding table, at addresses that captured steps read."""

    def replace(self, by_slot: Sequence[LowRank | None], fill: Fill) -> bool:
        """Replace the matrices, at the same addresses, and return True.

        Returns False, and replaces nothing, if a rank exceeds the capacity.
        """


class CapturedLora(Protocol):
    """LoRA for captured steps of one size. Its tensors are refilled before each replay."""

    def slot_weights(
        self, by_slot: Sequence[LowRank | None], outputs: Sequence[int], *, table: bool, upload: Upload
    ) -> SlotWeights:
        """Return the matrices of slots 1, 2, ... for one product or embedding table.

        by_slot  each slot's matrices, or None; at least one slot has matrices
        outputs  number of outputs of each module of the product
        table    whether the matrices change an embedding table, so that `add_rows` reads them, not `add`
        """

    def refill(self, slots: Sequence[int], fill: Fill) -> None:
        """Set each row's slot for the next replay, 0 for no adapter."""

    def add(self, y: Tensor, x: Tensor, weights: Any) -> None:
        """Add like Lora.add. weights: returned by `slot_weights`."""

    def add_rows(self, y: Tensor, tokens: Tensor, weights: Any) -> None:
        """Add like Lora.add_rows. weights: returned by `slot_weights`."""
