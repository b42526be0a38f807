"""Tilings of attention are measured, kept, and found again, by GPU, kernels and shape."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from infd.cli import main
from infd.kernels.triton.blocks import Blocks, Gpu, Tiling
from tests.kernels.attention_case import Case

GPU = Gpu("NVIDIA H100 80GB HBM3", 132, 227 * 1024)
OTHERS = Tiling(Blocks(16, 128, 8, 2), Blocks(64, 32, 4, 2), 4, 512)


@pytest.fixture
def shape(triton):
    from infd.kernels.triton.tiles import Shape

    return Shape(2, 2, 8, torch.float32)


class Priced:
    """An artificial cost. fails: blocks that cannot be used."""

    def __init__(self, few, many, fails=()):
        self._few, self._many, self._fails = few, many, fails

    def few(self, tiling):
        return None if tiling.few in self._fails else self._few(tiling)

    def many(self, tiling):
        return None if tiling.many in self._fails else self._many(tiling)


def distance(blocks, best):
    return 1.0 + sum(abs(one - other) / 16 for one, other in zip(blocks, best, strict=True))


def test_the_cheapest_tiling_is_found_one_parameter_at_a_time(shape):
    from infd.kernels.triton.tuning import search

    def few(tiling):
        return distance(tiling.few, OTHERS.few) + abs(tiling.programs - 4) + abs(tiling.least_keys - 512) / 256

    cost = Priced(few, lambda tiling: distance(tiling.many, OTHERS.many))
    found = search(shape, GPU, cost)
    usual = shape.default_tiling(GPU)
    assert found.tiling == OTHERS
    assert found.few == pytest.approx(cost.few(OTHERS) / cost.few(usual))
    assert found.many == pytest.approx(cost.many(OTHERS) / cost.many(usual))


def test_failing_tilings_are_skipped_and_small_gains_keep_the_default(shape):
    from infd.kernels.triton.tuning import search

    usual = shape.default_tiling(GPU)
    cost = Priced(
        lambda tiling: 0.1 if tiling.few == OTHERS.few else 1.0,
        lambda tiling: 0.98 if tiling.many == OTHERS.many else 1.0,
        fails=[OTHERS.few],
    )
    found = search(shape, GPU, cost)
    assert (found.tiling, found.few, found.many) == (usual, 1.0, 1.0)


def test_no_cut_is_tried_that_a_gpu_cannot_hold(triton):
    from infd.kernels.triton.blocks import needed
    from infd.kernels.triton.tiles import Shape
    from infd.kernels.triton.tuning import search

    small, tried = GPU._replace(shared=64 * 1024), []

    def few(tiling):
        tried.append(tiling.few)
        return 1.0

    def many(tiling):
        tried.append(tiling.many)
        return 1.0

    search(Shape(2, 4, 128, torch.bfloat16), small, Priced(few, many))
    assert len(set(tried)) > 20
    assert all(needed(blocks, 128, 2, small) <= small.shared for blocks in tried)


def test_steps_are_timed_whose_results_are_as_usual(device, shape):
    from infd.kernels.triton.tuning import Measured

    done = []
    cost = Measured(shape, GPU, device, lambda work: done.append(work()) or 0.5, [[(40, 1)], [(9, 1)] * 3], [[(3, 20)]])
    usual = shape.default_tiling(GPU)
    assert cost.few(usual) == 1.0
    assert cost.few(replace(usual, few=OTHERS.few, programs=4)) == 1.0
    assert cost.many(replace(usual, many=OTHERS.many)) == 0.5
    assert cost.few(replace(usual, few=Blocks(16, 48, 4, 2))) is None  # Triton requires powers of two
    cost._steps[1][0].expected.add_(1.0)
    assert cost.many(usual) is None
    assert len(done) == 5


def test_tunings_are_found_by_gpu_kernels_and_shape(shape, tmp_path, monkeypatch):
    from infd.kernels.triton import tilings

    tilings.write(tmp_path, GPU, {"another": OTHERS})
    tilings.write(tmp_path, GPU, {tilings.shape_name(shape): OTHERS})
    kept = tilings.read(tmp_path, GPU)
    assert kept.keys() == {"another", "2 x 2 heads of 8, float32"}
    known = tilings.Tilings(GPU, kept)
    other = shape._replace(head=16)
    assert (known[shape], known[other]) == (OTHERS, other.default_tiling(GPU))
    assert known.requested == [shape, other]
    assert tilings.read(tmp_path, GPU._replace(name="NVIDIA H200")) == {}
    monkeypatch.setattr(tilings.triton, "__version__", "0")
    assert tilings.read(tmp_path, GPU) == {}


def test_an_unusable_tuning_file_is_reported_and_ignored(triton, tmp_path, caplog):
    from infd.kernels.triton import tilings

    tilings.write(tmp_path, GPU, {}).write_text('{"x": 3}')
    assert tilings.read(tmp_path, GPU) == {}
    assert "so attention uses the default tilings: Expected" in caplog.text


def test_kernels_are_compiled_ahead_as_the_gpu_that_is_here_cuts(shape, tmp_path, monkeypatch):
    from infd.kernels.triton import blocks, tilings
    from infd.kernels.triton.compiled import compiling, target

    here, meta = torch.device("cuda", 0), torch.device("meta")
    monkeypatch.setattr(tilings, "directory", lambda: tmp_path)
    monkeypatch.setattr(blocks, "gpu", lambda device: GPU if device == here else Gpu())
    tilings.write(tmp_path, GPU, {tilings.shape_name(shape): OTHERS})
    with compiling(target("sm_90a"), here):
        assert tilings.tilings(meta)[shape] == OTHERS
    with compiling(target("sm_89")):
        assert tilings.tilings(meta).gpu == Gpu(shared=99 * 1024)
        assert tilings.tilings(meta)[shape] == shape.default_tiling(GPU)


@pytest.mark.parametrize("programs", [1, 1000])
def test_attention_is_the_same_however_it_is_cut(device, shape, programs):
    from infd.kernels.triton.attention import PagedAttention
    from infd.kernels.triton.tilings import Tilings, shape_name

    case = Case([(600, 1), (37, 50), (0, 3)], page_tokens=16, padding=1)
    expected = case.expected()
    case.move(device)
    measured = Tilings(GPU, {shape_name(shape): replace(OTHERS, least_keys=128)})
    out = case.compute(PagedAttention(programs, measured)).cpu().double()
    assert [measured[shape].few.keys, *map(str, measured.requested)] == [128, str(shape)]
    torch.testing.assert_close(out[: len(expected)], expected, atol=2e-6, rtol=2e-6)


def test_measuring_wants_the_gpu_here(triton, capsys):
    with pytest.raises(SystemExit) as left:
        main(("warm", "--target", "sm_90a", "--tune"))
    assert left.value.code == 64
    assert "omit --target" in capsys.readouterr().err
