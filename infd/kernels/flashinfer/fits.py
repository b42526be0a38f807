"""Which tensors FlashInfer's kernels can take. They load 16 bytes at once, and heads of few sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.flashinfer.wrappers import Asked

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.ops import KeyValuePages

HEADS = (64, 128, 256)  # sizes of a head that all of its kernels take
LOADED = 16  # bytes
THREADS = 1024  # of a block, in which the heads of a token are written


def loadable(*tensors: Tensor) -> bool:
    """Say whether each row begins where a load of 16 bytes may, its numbers side by side."""
    return all(
        tensor.stride(-1) == 1
        and tensor.storage_offset() * tensor.itemsize % LOADED == 0
        and all(stride * tensor.itemsize % LOADED == 0 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def asks(q: Tensor, pages: KeyValuePages, scale: float, softcap: float | None) -> Asked | None:
    """Return what a layer asks of attention, or None where that is none of FlashInfer's kernels."""
    _, heads, size = q.shape
    if size not in HEADS or pages.scales is not None or pages.k.dtype != q.dtype:
        return None
    return Asked(heads, pages.k.shape[1], size, scale, softcap, q.dtype)


def writes(k: Tensor, v: Tensor, pages: KeyValuePages) -> bool:
    """Say whether its kernel writes such keys and values into such a cache."""
    _, heads, size = k.shape
    plain = pages.scales is None and pages.k.dtype == k.dtype == v.dtype
    within = heads * (size * k.itemsize // LOADED) <= THREADS
    return plain and size in HEADS and within and loadable(k, v)
