"""A substitute for FlashInfer: each function computes in torch what FlashInfer's documentation specifies.

If FlashInfer is installed, the arguments of every call are bound to the real signature. Functions that captured steps
call never read tensor values on the host, as on a GPU.
"""

from __future__ import annotations

import inspect
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from infd.kernels.reference import attention as reference
from tests.kernels.attention_case import naive

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from infd.kernels.families.attention import AttentionBatch, KeyValuePages

INSTALLED = find_spec("flashinfer") is not None
LOADED = 16  # bytes of one load


class Package:
    """FlashInfer on a GPU of the given compute capability.

    calls  names of the functions called; for wrappers Class.method
    """

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.calls: list[str] = []
        self.utils = SimpleNamespace(get_compute_capability=lambda device: capability)
        self.real: ModuleType | None = import_module("flashinfer") if INSTALLED else None
        for what, made in (("Prefill", Prompts), ("Decode", Decoding)):
            name = f"Batch{what}WithPagedKVCacheWrapper"
            setattr(self, name, partial(self._wrapper, name, made))

    def called(self, name: str) -> int:
        return self.calls.count(name)

    def note(self, name: str, *given: Any, **named: Any) -> None:
        """Record a call, after binding its arguments to the real signature."""
        self.calls.append(name)
        real: Any = self.real
        if real is not None:
            for part in name.split("."):
                real = getattr(real, part)
            inspect.signature(real).bind(*given, **named)

    def _wrapper(
        self, name: str, made: type[Prompts] | type[Decoding], *given: Any, **named: Any
    ) -> Prompts | Decoding:
        self.note(name, *given, **named)
        return made(self, *given, **named)

    def xqa(self, *given: Any, **named: Any) -> None:
        self.note("xqa", *given, **named)
        _xqa(*given, **named)

    def append_paged_kv_cache(self, *given: Any, **named: Any) -> None:
        self.note("append_paged_kv_cache", *given, **named)
        _append(*given, **named)

    def rmsnorm(self, input: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        self.note("rmsnorm", input, weight, eps, out=out)
        assert input.dim() in (2, 3)
        out.copy_(_normed(input, weight, eps, 0.0))

    def gemma_rmsnorm(self, input: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
        self.note("gemma_rmsnorm", input, weight, eps, out=out)
        assert input.dim() == 2
        out.copy_(_normed(input, weight, eps, 1.0))

    def fused_add_rmsnorm(self, input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        self.note("fused_add_rmsnorm", input, residual, weight, eps)
        residual += input
        input.copy_(_normed(residual, weight, eps, 0.0))

    def gemma_fused_add_rmsnorm(self, input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        self.note("gemma_fused_add_rmsnorm", input, residual, weight, eps)
        residual += input
        input.copy_(_normed(residual, weight, eps, 1.0))

    def silu_and_mul(self, input: Tensor, *, out: Tensor) -> None:
        self.note("silu_and_mul", input, out=out)
        self._gate(functional.silu, input, out)

    def gelu_tanh_and_mul(self, input: Tensor, *, out: Tensor) -> None:
        self.note("gelu_tanh_and_mul", input, out=out)
        self._gate(lambda x: functional.gelu(x, approximate="tanh"), input, out)

    def _gate(self, activation: Callable[[Tensor], Tensor], input: Tensor, out: Tensor) -> None:
        assert input.is_contiguous()  # the kernel takes no strides
        assert out.is_contiguous()
        gate, up = input.float().chunk(2, -1)
        out.copy_(activation(gate) * up)

    def apply_rope_with_cos_sin_cache(
        self, positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox: bool
    ) -> tuple[Tensor, Tensor]:
        self.note("apply_rope_with_cos_sin_cache", positions, query, key, head_size, cos_sin_cache, is_neox)
        assert cos_sin_cache.dtype == torch.float32
        assert cos_sin_cache.is_contiguous()
        assert positions.is_contiguous()
        assert head_size in (64, 128, 256)
        half = cos_sin_cache.shape[1] // 2
        assert half * query.itemsize % LOADED == 0
        cos, sin = cos_sin_cache[positions].split(half, -1)

        def turn(x: Tensor) -> Tensor:
            heads = x.view(len(x), -1, head_size).float()
            turned = heads[..., : 2 * half]
            first, second = turned.chunk(2, -1) if is_neox else (turned[..., ::2], turned[..., 1::2])
            pair = first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]
            turned = torch.cat(pair, -1) if is_neox else torch.stack(pair, -1).flatten(-2)
            return torch.cat((turned, heads[..., 2 * half :]), -1).view(x.shape).to(x.dtype)

        return turn(query), turn(key)


class Prompts:
    """BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self, package: Package, space: Tensor, *, kv_layout: str, backend: str) -> None:
        assert kv_layout == "HND"
        assert space.dtype == torch.uint8
        self._package, self.backend = package, backend

    def plan(self, *given: Any, **named: Any) -> None:
        self._package.note("BatchPrefillWithPagedKVCacheWrapper.plan", self, *given, **named)
        self._plan(*given, **named)

    def _plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **named: Any,
    ) -> None:
        assert named.pop("causal")
        assert named.pop("non_blocking")
        _told(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        indptr, last = paged_kv_indptr.tolist(), paged_kv_last_page_len.tolist()
        self.starts = qo_indptr.tolist()
        self.pages = [paged_kv_indices[a:b].long() for a, b in pairwise(indptr)]
        self.lengths = [(len(pages) - 1) * page_size + n for pages, n in zip(self.pages, last, strict=True)]
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.named = named

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        self._package.note("BatchPrefillWithPagedKVCacheWrapper.run", self, q, paged_kv_cache, out=out)
        heads, kv_heads, head = self.sizes
        assert q.shape == out.shape == (self.starts[-1], heads, head)
        _typed(self.named, q, paged_kv_cache)
        if paged_kv_cache[0].dtype != q.dtype:
            assert self.backend == "fa2"  # fa3 requires fp8 queries too
        for i, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            mine = slice(self.starts[i], self.starts[i + 1])
            # HND layout: [pages, K, page, D]
            k, v = (_taken(cache, pages).transpose(1, 2).flatten(0, 1)[:length] for cache in paged_kv_cache)
            assert k.shape[1] == kv_heads
            window = self.named["window_left"]
            out[mine] = naive(
                q[mine],
                k,
                v,
                length - (mine.stop - mine.start),
                scale=self.named["sm_scale"],
                window=None if window == -1 else window + 1,
                softcap=self.named["logits_soft_cap"],
            ).to(out.dtype)
        return out


class Decoding:
    """BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(
        self,
        package: Package,
        space: Tensor,
        *,
        kv_layout: str,
        use_tensor_cores: bool,
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        assert kv_layout == "HND"
        assert space.dtype == torch.uint8
        self._package, self.tensor_cores, self._graph = package, use_tensor_cores, use_cuda_graph
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.first, self.pages, self.last = (
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )

    def reset_workspace_buffer(self, *given: Tensor) -> None:
        self._package.note("BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer", self, *given)
        assert [tensor.dtype for tensor in given] == [torch.uint8] * 2

    def plan(self, *given: Any, **named: Any) -> None:
        self._package.note("BatchDecodeWithPagedKVCacheWrapper.plan", self, *given, **named)
        if self._package.real is not None:  # the public method accepts any keyword
            inspect.signature(self._package.real.BatchDecodeWithPagedKVCacheWrapper._plan_impl).bind(
                self, *given, **named
            )
        self._plan(*given, **named)

    def _plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **named: Any,
    ) -> None:
        assert named.pop("non_blocking")
        assert self.tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        _told(indptr, indices, last_page_len, page_size)
        if self._graph:
            assert self.first is not None
            assert self.pages is not None
            assert self.last is not None
            assert len(last_page_len) == len(self.last)
            self.first.copy_(indptr)
            self.last.copy_(last_page_len)
            self.pages[: len(indices)].copy_(indices)
        else:
            assert len(indices) == indptr[-1]
            self.first, self.pages, self.last = indptr, indices, last_page_len
        self.sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        self.named = named

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        self._package.note("BatchDecodeWithPagedKVCacheWrapper.run", self, q, paged_kv_cache, out=out)
        heads, kv_heads, head, page_size = self.sizes
        assert self.first is not None
        assert self.pages is not None
        assert self.last is not None
        assert q.shape == out.shape == (len(self.last), heads, head)
        assert paged_kv_cache[0].shape[1:] == (kv_heads, page_size, head)
        _typed(self.named, q, paged_kv_cache)
        most = max(1, paged_kv_cache[0].shape[0])
        column = torch.arange(most)
        first, held = self.first[:-1, None].long(), self.first.long().diff()[:, None]
        table = self.pages[(first + column).clamp(max=len(self.pages) - 1)] * (column < held)
        lengths = (held[:, 0] - 1) * page_size + self.last
        window = self.named["window_left"] + 1
        given = _attended(
            q, paged_kv_cache, table, lengths, self.named["sm_scale"], window, self.named["logits_soft_cap"], None
        )
        return out.copy_(given)


class Plain:
    """Replaces Triton's fp8 family for cache writes, captured or not."""

    def __init__(self, batch: AttentionBatch | None = None) -> None:
        self._batch = batch

    def prepare(self, batch: AttentionBatch) -> Plain:
        return Plain(batch)

    captured = prepare

    def refill(self, starts: list[int]) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def write(self, k: Tensor, v: Tensor, pages: KeyValuePages) -> None:
        assert self._batch is not None
        reference.Plan([], self._batch).write(k, v, pages)


def gather(table: Tensor, first: Tensor, skipped: Tensor, pages: Tensor) -> None:
    """As `infd.kernels.triton.gather.gather`, in torch operations that can be recorded."""
    first = first.long()
    within = torch.arange(table.shape[1], device=table.device) - skipped[:, None]
    seen = (within >= 0) & (within < first.diff()[:, None])
    place = (within + first[:-1, None]).masked_fill(~seen, len(pages))
    beyond = torch.cat((pages, pages[:1]))
    pages.copy_(beyond.scatter_(0, place.view(-1), table.reshape(-1))[:-1])


def _typed(named: dict[str, Any], q: Tensor, caches: tuple[Tensor, Tensor]) -> None:
    """Check the planned dtypes against the tensors'."""
    assert named["q_data_type"] == q.dtype
    assert all(named["kv_data_type"] == cache.dtype for cache in caches)
    assert caches[0].dtype in (q.dtype, torch.float8_e4m3fn)


def _taken(cache: Tensor, pages: Tensor) -> Tensor:
    """Return pages of a cache; torch cannot index 8-bit floats."""
    return cache.view(torch.uint8)[pages].view(cache.dtype) if cache.itemsize == 1 else cache[pages]


def _told(indptr: Tensor, indices: Tensor, last: Tensor, page_size: int) -> None:
    """Check the page arguments of a plan."""
    assert indptr.dtype == indices.dtype == last.dtype == torch.int32
    assert indptr.device.type == last.device.type == "cpu"  # FlashInfer's planning reads them on the host
    assert all(a < b for a, b in pairwise(indptr.tolist()))
    assert all(0 < count <= page_size for count in last.tolist())


def _attended(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    table: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend one query a sequence to its keys, without reading values on the host. window 0: unlimited."""
    k, v = (_taken(cache, table.long()).transpose(2, 3).flatten(1, 2) for cache in caches)  # [S, L, K, D]
    at = torch.arange(k.shape[1])
    seen = at < lengths.long()[:, None]
    if window:
        seen &= at >= lengths.long()[:, None] - window
    k, v = (x.double().masked_fill(~seen[..., None, None], 0) for x in (k, v))
    queries = q.double().unflatten(1, (k.shape[2], -1))  # [S, K, G, D]
    scores = torch.einsum("skgd,slkd->skgl", queries, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, :, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("skgl,slkd->skgd", weights, v).flatten(1, 2).to(q.dtype)


def _xqa(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    output: Tensor,
    workspace_buffer: Tensor,
    semaphores: Tensor,
    num_kv_heads: int,
    page_size: int,
    *,
    sinks: Tensor | None,
    q_scale: float,
    sliding_win_size: int,
    kv_layout: str,
    enable_pdl: bool | None = None,
) -> None:
    sequences, beams, heads, head = q.shape
    assert beams == 1
    assert q.is_contiguous()  # the kernel takes strides of the cache only
    assert output.is_contiguous()
    assert output.shape == q.shape
    assert q.dtype == k_cache.dtype == v_cache.dtype  # with an fp8 cache XQA would quantize the queries too
    assert page_table.is_contiguous()
    assert page_table.dtype == torch.int32
    assert len(page_table) == sequences
    assert seq_lens.shape == (sequences, 1)
    assert seq_lens.dtype == torch.uint32
    assert page_size in (16, 32, 64, 128)
    assert kv_layout == "HND"
    assert k_cache.shape[1:] == (num_kv_heads, page_size, head)
    assert heads // num_kv_heads <= 32
    assert workspace_buffer.dtype == torch.uint8
    assert semaphores.dtype == torch.uint32
    assert len(semaphores) >= sequences * num_kv_heads
    if sinks is not None:
        assert sinks.shape == (num_kv_heads, heads // num_kv_heads)
        assert sinks.dtype == torch.float32
    lengths = seq_lens[:, 0].view(torch.int32)
    scale = q_scale / head**0.5
    output[:, 0] = _attended(q[:, 0], (k_cache, v_cache), page_table, lengths, scale, sliding_win_size, None, sinks)


def _append(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: tuple[Tensor, Tensor],
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    *,
    kv_layout: str,
) -> None:
    tokens, heads, head = append_key.shape
    indices = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    assert kv_layout == "HND"
    assert all(tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous() for tensor in indices)
    assert len(batch_indices) == len(positions) == tokens
    assert len(kv_indptr) == len(kv_last_page_len) + 1
    assert head in (64, 128, 256)
    for new, cache in zip((append_key, append_value), paged_kv_cache, strict=True):
        assert new.dtype == cache.dtype
        assert new.stride(2) == 1
        assert all(stride * new.itemsize % LOADED == 0 for stride in new.stride()[:2])
        assert cache.shape[1] == heads
        size = cache.shape[2]
        page = kv_indices[kv_indptr[batch_indices.long()] + positions // size]
        cache[page.long(), :, (positions % size).long()] = new


def _normed(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    assert weight.dtype == x.dtype  # the kernel assumes x's dtype
    assert x.stride(-1) == 1
    assert all(stride * x.itemsize % LOADED == 0 for stride in x.stride()[:-1])
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight.float() + offset)).to(x.dtype)
