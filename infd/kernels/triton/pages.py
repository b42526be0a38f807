"""Write keys and values to the cache on a GPU.

An fp8 cache stores elements divided by the head's scale and clamped to the dtype's range.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.attention import KeyValuePages

BLOCK = 2048  # most elements per program


@triton.jit
def to_cache(value, scale, KIND: tl.constexpr, LIMIT: tl.constexpr):
    """Convert elements to KIND, the cache's dtype: divide by `scale` and clamp to LIMIT first, unless LIMIT is 0."""
    if LIMIT > 0:
        value = value.to(tl.float32) / scale
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return value.to(KIND)


@triton.jit
def write(
    k,
    v,
    k_pages,
    v_pages,
    scales,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a block of the keys and values of one token to the token's slot."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < KV_HEADS * HEAD
    head = element // HEAD
    width = element % HEAD
    place = ((slot // PAGE * KV_HEADS + head) * PAGE + slot % PAGE) * HEAD + width
    k_scale = 1.0
    v_scale = 1.0
    if LIMIT > 0:
        k_scale = tl.load(scales + head, mask=inside, other=1.0)
        v_scale = tl.load(scales + KV_HEADS + head, mask=inside, other=1.0)
    kind: tl.constexpr = k_pages.dtype.element_ty
    new = tl.load(k + token * k_token + head * k_head + width, mask=inside, other=0.0)
    tl.store(k_pages + place, to_cache(new, k_scale, kind, LIMIT), mask=inside)
    new = tl.load(v + token * v_token + head * v_head + width, mask=inside, other=0.0)
    tl.store(v_pages + place, to_cache(new, v_scale, kind, LIMIT), mask=inside)


def limit(pages: KeyValuePages) -> float:
    """Return the largest number of the dtype of scaled pages; 0 for unscaled pages."""
    return 0.0 if pages.scales is None else torch.finfo(pages.k.dtype).max


def store(k: Tensor, v: Tensor, pages: KeyValuePages, slots: Tensor) -> None:
    """Write k and v, each [T, K, D], to slots [T]."""
    tokens, heads, size = k.shape
    assert k.stride(2) == v.stride(2) == 1
    block = min(triton.next_power_of_2(heads * size), BLOCK)
    write[tokens, triton.cdiv(heads * size, block)](
        k,
        v,
        pages.k,
        pages.v,
        slots if pages.scales is None else pages.scales,
        slots,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        KV_HEADS=heads,
        PAGE=pages.k.shape[2],
        HEAD=size,
        LIMIT=limit(pages),
        BLOCK=block,
    )
