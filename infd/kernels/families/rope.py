"""Rotary position embeddings of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import AttentionPlan, KeyValuePages
    from infd.kernels.families.norm import HeadNorm


class Rope(Protocol):
    """Rotates queries and keys by position, and writes keys and values to the cache."""

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return q [T, H, D] and k [T, K, D] with the first R elements of every head rotated, the others unchanged.

        positions    [T] int64: rows of the table
        table        [rows, 2, R / 2] float32: cosines, then sines
        interleaved  elements 2i and 2i + 1 form a pair (GPT-J style), not i and i + R / 2 (GPT-NeoX style)
        """

    def enter(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        table: Tensor,
        plan: AttentionPlan,
        pages: KeyValuePages,
        *,
        interleaved: bool = False,
        q_norm: HeadNorm | None = None,
        k_norm: HeadNorm | None = None,
    ) -> Tensor:
        """Norm and rotate q and k, write k and v to the cache, and return q: all work from projection to attention."""
        q = q if q_norm is None else q_norm(q)
        k = k if k_norm is None else k_norm(k)
        q, k = self(q, k, positions, table, interleaved=interleaved)
        plan.write(k, v, pages)
        return q
