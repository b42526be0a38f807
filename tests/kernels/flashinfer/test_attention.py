"""What FlashInfer is told of a step, read as its documentation says; and its own signatures, where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.attention_case import Case
from tests.kernels.flashinfer.documented import Package

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.kernels.flashinfer.attention import PagedAttention

MIX = [(0, 5), (37, 1), (20, 3), (0, 1), (3, 21), (11, 1)]
DECODING = [(37, 1), (0, 1), (15, 1), (16, 1), (90, 1)]
PROMPTS, DECODER = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"


@pytest.fixture
def make() -> Callable[..., tuple[PagedAttention, Package]]:
    """Return what makes attention, and the package that stands for FlashInfer."""
    pytest.importorskip("triton")
    from infd.kernels.flashinfer.attention import PagedAttention
    from infd.kernels.triton.attention import PagedAttention as Triton

    def make(capability: tuple[int, int] = (9, 0), **chosen: Any) -> tuple[PagedAttention, Package]:
        package = Package(capability)
        return PagedAttention(package, Triton(room=4), **chosen), package

    return make


@pytest.mark.parametrize(
    ("page_tokens", "window", "softcap"), [(4, None, None), (3, 7, None), (16, None, 0.5), (1, 30, 3.0), (16, 18, None)]
)
def test_prompts_are_told_so_that_they_give_what_the_naive_loop_gives(make, page_tokens, window, softcap):
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
        ((8, 0), 16, None, None, False),  # a GPU that the other kernel is not compiled for
        ((9, 0), 8, 20, None, False),  # a page that it does not know
        ((9, 0), 16, 20, 0.7, False),  # scores that are capped
        ((9, 0), 16, None, None, True),  # as asked
    ],
)
@pytest.mark.parametrize("shared", [1, 4, 5])
def test_else_decoding_is_planned(make, capability, page_tokens, window, softcap, planned, shared):
    attention, package = make(capability, planned=planned)
    case = Case(DECODING, head=64, shared=shared, page_tokens=page_tokens, window=window, softcap=softcap, padding=3)
    assert case.error(attention) < 1e-5
    assert package.called(f"{DECODER}.run") == 1
    assert not package.called("xqa") + package.called(PROMPTS)


def test_pages_behind_a_window_are_not_told_of(make):
    from infd.kernels.flashinfer.wrappers import Keys

    keys = Keys.of([100, 3, 16], [1, 2, 1], 4, 10)
    assert keys.skipped.tolist() == [22, 0, 1]
    assert keys.first.tolist() == [0, 4, 6, 10]
    assert keys.last.tolist() == [1, 1, 1]


def test_a_backend_may_be_chosen_for_prompts(make):
    attention, _ = make(backend="fa2")
    case = Case(MIX, head=64)
    assert case.error(attention) < 1e-5
    (lent,) = attention._space.prompts._lent
    assert lent.wrapper.backend == "fa2"


def test_layers_that_ask_for_the_same_share_a_wrapper_and_a_later_step_takes_it(make):
    attention, package = make()
    case = Case(MIX, head=64)
    plan = attention.prepare(case.batch)
    case.pages.k.nan_to_num_()
    case.pages.v.nan_to_num_()
    for _ in range(3):
        first = plan.run(case.q, case.pages, scale=0.1)
    assert package.called(PROMPTS) == package.called(f"{PROMPTS}.plan") == 1
    plan.run(case.q, case.pages, scale=0.2)
    assert package.called(PROMPTS) == 2  # the first one is still the step's
    assert plan.run(case.q, case.pages, scale=0.1).equal(first)
    del plan
    attention.prepare(case.batch).run(case.q, case.pages, scale=0.3)
    assert package.called(PROMPTS) == 2


class Triton:
    """Stands for Triton's family, and says what came to it."""

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
        (MIX, {"head": 64, "sinks": True}, ["run"]),
        (DECODING, {"head": 64, "sinks": True}, ["run"]),  # its pages of 4 tokens want a plan
        (DECODING, {"head": 64, "sinks": True, "page_tokens": 16}, []),
    ],
)
def test_what_flashinfer_does_not_take_goes_to_triton(make, lengths, case, came):
    from infd.kernels.flashinfer.attention import PagedAttention

    triton = Triton()
    Case(lengths, **case).compute(PagedAttention(Package(), triton))
    assert triton.came == came


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what FlashInfer warns of is not ours to mend
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 30.0)])
def test_on_a_gpu_flashinfer_gives_what_the_naive_loop_gives(window, softcap, decoding, planned):
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    from infd.kernels.flashinfer.attention import PagedAttention

    lengths = [*DECODING, (600, 1)] if decoding else [*MIX, (600, 1), (300, 200)]
    limits = {"window": window, "softcap": softcap}
    case = Case(lengths, shared=4, head=128, page_tokens=16, padding=1, dtype=torch.bfloat16, **limits)
    expected = case.expected()
    case.move(torch.device("cuda"))
    out = case.compute(PagedAttention(planned=planned)).cpu().double()
    assert out.isfinite().all()
    assert bool(((out[: len(expected)] - expected).abs() < 0.006 + expected.abs() / 128).all())
