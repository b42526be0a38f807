"""What FlashInfer is told of a step, read as its documentation says; and its own signatures, where it is installed."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.attention_case import Case, naive

if TYPE_CHECKING:
    from torch import Tensor

MIX = [(0, 5), (37, 1), (20, 3), (0, 1), (3, 21), (11, 1)]


class Documented:
    """Computes what a wrapper is documented to compute, from nothing but what it is given."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.planned: dict[str, Any] = {}

    def plan(
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
        indptr, last = paged_kv_indptr.tolist(), paged_kv_last_page_len.tolist()
        assert all(0 < count <= page_size for count in last)
        self.starts = qo_indptr.tolist()
        self.pages = [paged_kv_indices[a:b].long() for a, b in pairwise(indptr)]
        self.lengths = [(len(pages) - 1) * page_size + n for pages, n in zip(self.pages, last, strict=True)]
        self.sizes = (num_qo_heads, num_kv_heads, head_dim_qk)
        self.named = named

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        heads, kv_heads, head = self.sizes
        assert q.shape == out.shape == (self.starts[-1], heads, head)
        for i, (pages, length) in enumerate(zip(self.pages, self.lengths, strict=True)):
            mine = slice(self.starts[i], self.starts[i + 1])
            # HND: [pages, K, page, D]
            k, v = (cache[pages].transpose(1, 2).flatten(0, 1)[:length] for cache in paged_kv_cache)
            assert k.shape[1] == kv_heads
            window, softcap = self.named["window_left"], self.named["logits_soft_cap"]
            out[mine] = naive(
                q[mine],
                k,
                v,
                length - (mine.stop - mine.start),
                scale=self.named["sm_scale"],
                window=None if window == -1 else window + 1,
                softcap=softcap,
            ).to(out.dtype)
        return out


@pytest.fixture
def attention(triton):
    from infd.kernels.flashinfer.attention import PagedAttention
    from infd.kernels.triton.attention import PagedAttention as Triton

    return PagedAttention(lambda device: Documented, Triton(room=4))


@pytest.fixture
def triton() -> None:
    pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("page_tokens", "window", "softcap"), [(4, None, None), (3, 7, None), (16, None, 0.5), (1, 30, 3.0)]
)
def test_flashinfer_is_told_what_makes_it_give_what_the_naive_loop_gives(
    attention, monkeypatch, page_tokens, window, softcap
):
    case = Case(MIX, head=64, page_tokens=page_tokens, window=window, softcap=softcap, padding=2)
    keep(monkeypatch)
    assert case.error(attention) < 1e-5


def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the cache written in plain torch: Triton's own write is tested where its interpreter is mended."""
    from infd.kernels.flashinfer import attention as module
    from infd.kernels.reference.attention import PagedAttention

    def write(plan: Any, k: Tensor, v: Tensor, pages: Any) -> None:
        PagedAttention().prepare(plan._batch).write(k, v, pages)

    monkeypatch.setattr(module.Plan, "write", write)


def test_layers_that_ask_for_the_same_share_a_wrapper_and_a_later_step_takes_it(attention, monkeypatch):
    keep(monkeypatch)
    monkeypatch.setattr(Documented, "made", 0)
    case = Case(MIX, head=64)
    plan = attention.prepare(case.batch)
    case.pages.k.nan_to_num_()
    case.pages.v.nan_to_num_()
    for _ in range(3):
        first = plan.run(case.q, case.pages, scale=0.1)
    assert Documented.made == 1
    plan.run(case.q, case.pages, scale=0.2)
    assert Documented.made == 2  # the first one is still the step's
    assert plan.run(case.q, case.pages, scale=0.1).equal(first)
    del plan
    attention.prepare(case.batch).run(case.q, case.pages, scale=0.3)
    assert Documented.made == 2


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_calls_fit_flashinfers_signatures(triton):
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper as Real

    from infd.kernels.flashinfer.attention import PagedAttention, Wrappers

    class Bound(Documented):
        def __init__(self, *args: Any, **named: Any) -> None:
            inspect.signature(Real).bind(*args, **named)

        def plan(self, *args: Any, **named: Any) -> None:
            inspect.signature(Real.plan).bind(self, *args, **named)

        def run(self, *args: Any, **named: Any) -> Tensor:  # type: ignore[override]
            inspect.signature(Real.run).bind(self, *args, **named)
            return named["out"]

    space = torch.empty(1)
    attention = PagedAttention(lambda _: lambda: Bound(space, kv_layout="HND", backend="auto"))
    case = Case(MIX, head=64)
    attention.prepare(case.batch).run(case.q, case.pages, scale=0.1)
    assert isinstance(attention._wrappers, Wrappers)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 30.0)])
def test_on_a_gpu_flashinfer_gives_what_the_naive_loop_gives(window, softcap):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from infd.kernels.flashinfer.attention import PagedAttention

    lengths = [*MIX, (600, 1), (300, 200)]
    case = Case(lengths, head=128, page_tokens=16, window=window, softcap=softcap, padding=1, dtype=torch.bfloat16)
    expected = case.expected()
    case.move(torch.device("cuda"))
    out = case.compute(PagedAttention()).cpu().double()
    assert out.isfinite().all()
    assert bool(((out[: len(expected)] - expected).abs() < 0.006 + expected.abs() / 128).all())
