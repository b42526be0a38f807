"""Rotary positions on a GPU: queries and keys in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

TILE = 1024  # numbers that a program turns, about


@triton.jit
def _turn(
    x,
    out,
    token,
    head,
    cos,
    sin,
    x_token,
    x_head,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Turn some heads [n] of one token by the angles of its pairs."""
    pair = tl.arange(0, BLOCK_PAIRS)
    inside = (head < HEADS)[:, None] & (pair < PAIRS)[None, :]
    first = 2 * pair if INTERLEAVED else pair
    apart = 1 if INTERLEAVED else PAIRS
    source = x + token * x_token + (head * x_head)[:, None]
    target = out + token * (HEADS * HEAD) + (head * HEAD)[:, None]
    left = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + first[None, :] + apart, mask=inside, other=0.0).to(tl.float32)
    turned = left * cos[None, :] - right * sin[None, :]
    tl.store(target + first[None, :], turned.to(out.dtype.element_ty), mask=inside)
    turned = right * cos[None, :] + left * sin[None, :]
    tl.store(target + first[None, :] + apart, turned.to(out.dtype.element_ty), mask=inside)
    if HEAD > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, BLOCK_REST)
        inside = (head < HEADS)[:, None] & (rest < HEAD)[None, :]
        tl.store(target + rest[None, :], tl.load(source + rest[None, :], mask=inside), mask=inside)


@triton.jit
def rotate(
    q,
    k,
    q_out,
    k_out,
    positions,
    table,
    q_token,
    q_head,
    k_token,
    k_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Turn one token's heads: blocks of q's, then blocks of k's."""
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_PAIRS)
    angles = table + tl.load(positions + token) * (2 * PAIRS) + pair
    cos = tl.load(angles, mask=pair < PAIRS, other=0.0)
    sin = tl.load(angles + PAIRS, mask=pair < PAIRS, other=0.0)
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    blocks = tl.cdiv(HEADS, BLOCK_HEADS)
    if block < blocks:
        _turn(q, q_out, token, head, cos, sin, q_token, q_head,
              HEADS, HEAD, PAIRS, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST)  # fmt: skip
    else:
        _turn(k, k_out, token, head - blocks * BLOCK_HEADS, cos, sin, k_token, k_head,
              KV_HEADS, HEAD, PAIRS, INTERLEAVED, BLOCK_PAIRS, BLOCK_REST)  # fmt: skip


class Rope:
    """The rope family."""

    def __call__(
        self, q: Tensor, k: Tensor, positions: Tensor, table: Tensor, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
        tokens, heads, size = q.shape
        kv_heads, pairs = k.shape[1], table.shape[2]
        turned = (
            torch.empty(q.shape, dtype=q.dtype, device=q.device),
            torch.empty(k.shape, dtype=k.dtype, device=k.device),
        )
        block = min(triton.next_power_of_2(heads), max(1, TILE // triton.next_power_of_2(size)))
        rotate[tokens, triton.cdiv(heads, block) + triton.cdiv(kv_heads, block)](
            q,
            k,
            *turned,
            positions,
            table,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD=size,
            PAIRS=pairs,
            INTERLEAVED=interleaved,
            BLOCK_HEADS=block,
            BLOCK_PAIRS=triton.next_power_of_2(pairs),
            BLOCK_REST=triton.next_power_of_2(max(1, size - 2 * pairs)),
        )
        return turned
