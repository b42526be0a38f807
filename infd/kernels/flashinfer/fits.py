"""Which tensors FlashInfer's kernels can take. They load 16 bytes at once, and heads of few sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.kernels.families.attention import FLOAT8
from infd.kernels.flashinfer.wrappers import Asked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infd.kernels.families.attention import KeyValuePages

HEADS = (64, 128, 256)  # sizes of a head that all of its kernels take
WIDE = (128, 256)  # those that they are known to read in 8-bit floats; its sources doubt smaller ones
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


def asks(q: Tensor, pages: KeyValuePages, scale: float, softcap: float | None) -> Asked | str:
    """Return what a layer asks of attention, or what there is about it that none of FlashInfer's kernels takes."""
    _, heads, size = q.shape
    if size not in HEADS:
        return f"heads of {size}"
    kept = pages.k.dtype
    if kept is FLOAT8 and size not in WIDE:
        return f"heads of {size} in 8-bit floats"
    if kept is not FLOAT8 and (kept is not q.dtype or pages.scales is not None):
        return f"a cache of {name(kept)} beside {name(q.dtype)}"
    return Asked(heads, pages.k.shape[1], size, scale, softcap, q.dtype, kept)


def cannot_write(k: Tensor, v: Tensor, pages: KeyValuePages) -> str | None:
    """Return why its kernel does not write such keys and values into such a cache, or None where it does."""
    _, heads, size = k.shape
    if size not in HEADS:
        return f"heads of {size}"
    if pages.scales is not None or not pages.k.dtype == k.dtype == v.dtype:
        return f"writing to a cache of {name(pages.k.dtype)}"
    if heads * (size * k.itemsize // LOADED) > THREADS:
        return f"writing {heads} heads of {size}"
    return None if loadable(k, v) else "keys that lie askew"


def name(dtype: torch.dtype) -> str:
    """Return what a type is called."""
    return str(dtype).removeprefix("torch.")
