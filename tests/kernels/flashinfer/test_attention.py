"""The arguments of FlashInfer's attention, checked by a substitute, and by the real signatures where installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.kernels.families.attention import FLOAT8
from tests.kernels.attention_case import Case
from tests.kernels.flashinfer.documented import Package, Plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.kernels.flashinfer.attention import PagedAttention

MIX = [(0, 5), (37, 1), (20, 3), (0, 1), (3, 21), (11, 1)]
DECODING = [(37, 1), (0, 1), (15, 1), (16, 1), (90, 1)]
PROMPTS, DECODER = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


@pytest.fixture
def make() -> Callable[..., tuple[PagedAttention, Package]]:
    """Return a function that makes attention over a substitute of FlashInfer, and that substitute."""
    pytest.importorskip("triton")
    from infd.kernels.flashinfer.attention import PagedAttention
    from infd.kernels.triton.attention import PagedAttention as Triton

    def make(capability: tuple[int, int] = (9, 0), **chosen: Any) -> tuple[PagedAttention, Package]:
        package = Package(capability)
        return PagedAttention(package, Triton(programs=4), **chosen), package

    return make


@pytest.mark.parametrize(
    ("page_tokens", "window", "softcap"), [(4, None, None), (3, 7, None), (16, None, 0.5), (1, 30, 3.0), (16, 18, None)]
)
def test_prompts_equal_the_naive_loop(make, page_tokens, window, softcap):
    attention, package = make()
    case = Case(MIX, head=64, page_tokens=page_tokens, window=window, softcap=softcap, padding=2)
    assert case.error(attention) < 1e-5
    assert package.called(f"{PROMPTS}.run") == package.called("append_paged_kv_cache") == 1
    assert not package.called(f"{DECODER}.run") + package.called("xqa")


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("page_tokens", "window"), [(16, None), (32, 20), (16, 1)])
def test_decoding_needs_no_plan_where_pages_and_scores_are_such(make, page_tokens, window, sinks):
    attention, package = make()
    case = Case(DECODING, head=64, shared=4, page_tokens=page_tokens, window=window, sinks=sinks, padding=1)
    assert case.error(attention) < 1e-5
    assert package.called("xqa") == 1
    assert not package.called(DECODER)


@pytest.mark.parametrize(
    ("capability", "page_tokens", "window", "softcap", "planned"),
    [
        ((8, 0), 16, None, None, False),  # XQA is not compiled for this GPU
        ((9, 0), 8, 20, None, False),  # XQA does not support this page size
        ((9, 0), 16, 20, 0.7, False),  # XQA does not support a softcap
        ((9, 0), 16, None, None, True),  # requested
    ],
)
@pytest.mark.parametrize("shared", [1, 4, 5])
def test_else_decoding_is_planned(make, capability, page_tokens, window, softcap, planned, shared):
    attention, package = make(capability, planned=planned)
    case = Case(DECODING, head=64, shared=shared, page_tokens=page_tokens, window=window, softcap=softcap, padding=3)
    assert case.error(attention) < 1e-5
    assert package.called(f"{DECODER}.run") == 1
    assert not package.called("xqa") + package.called(PROMPTS)


def test_pages_behind_a_window_are_not_passed(make):
    from infd.kernels.flashinfer.wrappers import Keys

    keys = Keys.of([100, 3, 16], [1, 2, 1], 4, 10)
    assert keys.skipped.tolist() == [22, 0, 1]
    assert keys.first.tolist() == [0, 4, 6, 10]
    assert keys.last.tolist() == [1, 1, 1]


def test_a_backend_may_be_chosen_for_prompts(make):
    attention, _ = make(backend="fa2")
    case = Case(MIX, head=64)
    assert case.error(attention) < 1e-5
    (lent,) = attention._state.prompts._planned
    assert lent.wrapper.backend == "fa2"


def test_layers_with_equal_plans_share_a_wrapper_and_a_later_step_reuses_it(make):
    attention, package = make()
    case = Case(MIX, head=64)
    plan = attention.prepare(case.batch)
    case.pages.k.nan_to_num_()
    case.pages.v.nan_to_num_()
    for _ in range(3):
        first = plan.run(case.q, case.pages, scale=0.1)
    assert package.called(PROMPTS) == package.called(f"{PROMPTS}.plan") == 1
    plan.run(case.q, case.pages, scale=0.2)
    assert package.called(PROMPTS) == 2  # the step still uses the first wrapper
    assert plan.run(case.q, case.pages, scale=0.1).equal(first)
    del plan
    attention.prepare(case.batch).run(case.q, case.pages, scale=0.3)
    assert package.called(PROMPTS) == 2


@pytest.mark.parametrize(
    ("lengths", "sinks", "window", "softcap"),
    [(MIX, False, None, None), (MIX, False, 7, 0.5), (DECODING, False, None, None), (DECODING, False, 20, 3.0)],
)
def test_a_cache_of_8_bit_floats_is_read_by_the_scales_of_its_heads(lengths, sinks, window, softcap):
    pytest.importorskip("triton")
    from infd.kernels.flashinfer.attention import Float8PagedAttention

    package = Package()
    limits = {"window": window, "softcap": softcap, "padding": 2}
    case = Case(lengths, head=128, shared=4, page_tokens=16, held=FLOAT8, **limits)
    assert case.error(Float8PagedAttention(package, Plain())) < 1e-5
    assert package.called(f"{DECODER if lengths is DECODING else PROMPTS}.run") == 1
    assert not package.called("xqa") + package.called("append_paged_kv_cache")


def test_each_delegation_to_triton_is_logged_once():
    pytest.importorskip("triton")
    from infd.kernels.flashinfer.attention import PagedAttention

    attention = PagedAttention(Package(), Triton())
    for case in ({"head": 80}, {"head": 64, "sinks": True}, {"head": 80}, {"head": 64, "held": torch.float16}):
        Case(MIX, **case).compute(attention)
    told = "heads of 80; sinks of prompts; writing to a cache of float16; a cache of float16 with queries of float32"
    assert attention.refused == {"flashinfer": f"delegates to triton: {told}"}


def test_it_computes_in_its_given_workspace():
    pytest.importorskip("triton")
    from infd.kernels.flashinfer.attention import PagedAttention
    from infd.kernels.ops import Workspace

    attention = PagedAttention(Package(), Triton())
    assert isinstance(attention, Workspace)
    for _ in range(2):  # two runners, one after the other
        memory = torch.zeros(attention.workspace_bytes, dtype=torch.uint8)
        attention.work_in(memory)
        case = Case(DECODING, head=64, page_tokens=16)
        assert case.error(attention) < 1e-5
        state = attention._state
        parts = [state._semaphores, state._partial, state._scratch]
        assert {part.untyped_storage().data_ptr() for part in parts} == {memory.data_ptr()}
        assert sum(part.nbytes for part in parts) == len(memory)


class Triton:
    """Replaces Triton's family, and records its calls."""

    def __init__(self) -> None:
        self.came: list[str] = []

    def prepare(self, batch: Any) -> Triton:
        return self

    def write(self, *_: Any) -> None:
        self.came.append("write")

    def run(self, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self.came.append("run")
        return q


@pytest.mark.parametrize(
    ("lengths", "case", "came"),
    [
        (MIX, {"head": 80}, ["write", "run"]),
        (MIX, {"head": 64, "held": torch.float16}, ["write", "run"]),
        (MIX, {"head": 64, "held": FLOAT8}, ["write", "run"]),
        (MIX, {"head": 128, "held": FLOAT8}, ["write"]),
        (MIX, {"head": 64, "sinks": True}, ["run"]),
        (DECODING, {"head": 64, "sinks": True}, ["run"]),  # pages of 4 tokens require a plan
        (DECODING, {"head": 64, "sinks": True, "page_tokens": 16}, []),
    ],
)
def test_unsupported_cases_are_delegated_to_triton(make, lengths, case, came):
    from infd.kernels.flashinfer.attention import Float8PagedAttention, PagedAttention

    triton = Triton()
    attention = (Float8PagedAttention if case.get("held") is FLOAT8 else PagedAttention)(Package(), triton)
    Case(lengths, **case).compute(attention)
    assert triton.came == came
    assert bool(attention.refused) == bool(came)


@pytest.mark.filterwarnings("default")  # FlashInfer's own warnings
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 30.0)])
def test_on_a_gpu_flashinfer_equals_the_naive_loop(gpu, window, softcap, decoding, planned):
    from infd.kernels.flashinfer.attention import PagedAttention

    lengths = [*DECODING, (600, 1)] if decoding else [*MIX, (600, 1), (300, 200)]
    limits = {"window": window, "softcap": softcap}
    case = Case(lengths, shared=4, head=128, page_tokens=16, padding=1, dtype=torch.bfloat16, **limits)
    expected = case.expected()
    case.move(gpu)
    out = case.compute(PagedAttention(planned=planned)).cpu().double()
    assert out.isfinite().all()
    assert bool(((out[: len(expected)] - expected).abs() < 0.006 + expected.abs() / 128).all())


@pytest.mark.filterwarnings("default")  # FlashInfer's own warnings
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("shared", [2, 4])
@pytest.mark.parametrize("window", [None, 100])
def test_on_a_gpu_flashinfer_reads_8_bit_floats_as_the_naive_loop_does(gpu, window, shared, decoding):
    from infd.kernels.flashinfer.attention import Float8PagedAttention

    lengths = [*DECODING, (600, 1)] if decoding else [*MIX, (600, 1), (300, 200)]
    case = Case(lengths, shared=shared, head=128, page_tokens=16, window=window, dtype=torch.bfloat16, held=FLOAT8)
    expected = case.expected()
    case.move(gpu)
    out = case.compute(Float8PagedAttention()).cpu().double()
    assert bool(((out - expected).abs() < 0.02 + expected.abs() / 64).all())  # queries are rounded twice
