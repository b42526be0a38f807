"""Tilings are measured, kept, and found again, by GPU, kernels and shape."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from infd.cli import main
from infd.groups import Groups
from infd.kernels.triton.blocks import Blocks, Gpu, Tiling
from infd.kernels.triton.expert_tiles import ExpertsShape, ExpertsTiling, Tile, needed
from tests.kernels.attention_case import Case

GPU = Gpu("NVIDIA H100 80GB HBM3", 132, 227 * 1024)
OTHERS = Tiling(Blocks(16, 128, 8, 2), Blocks(64, 32, 4, 2), 4, 512)

EXPERTS = ExpertsTiling(Tile(32, 128, 8, 3), Tile(128, 256, 8, 4))
MIXTURE = ExpertsShape(8, 2, 64, 32, torch.bfloat16)


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
    from infd.kernels.triton.tuning_attention import find

    def few(tiling):
        return distance(tiling.few, OTHERS.few) + abs(tiling.programs - 4) + abs(tiling.least_keys - 512) / 256

    cost = Priced(few, lambda tiling: distance(tiling.many, OTHERS.many))
    found = find(shape, GPU, cost)
    usual = shape.default_tiling(GPU)
    assert found.tiling == OTHERS
    assert found.few == pytest.approx(cost.few(OTHERS) / cost.few(usual))
    assert found.many == pytest.approx(cost.many(OTHERS) / cost.many(usual))


def test_failing_tilings_are_skipped_and_small_gains_keep_the_default(shape):
    from infd.kernels.triton.tuning_attention import find

    usual = shape.default_tiling(GPU)
    cost = Priced(
        lambda tiling: 0.1 if tiling.few == OTHERS.few else 1.0,
        lambda tiling: 0.98 if tiling.many == OTHERS.many else 1.0,
        fails=[OTHERS.few],
    )
    found = find(shape, GPU, cost)
    assert (found.tiling, found.few, found.many) == (usual, 1.0, 1.0)


def test_no_cut_is_tried_that_a_gpu_cannot_hold(triton):
    from infd.kernels.triton.blocks import needed
    from infd.kernels.triton.tiles import Shape
    from infd.kernels.triton.tuning_attention import find

    small, tried = GPU._replace(shared=64 * 1024), []

    def few(tiling):
        tried.append(tiling.few)
        return 1.0

    def many(tiling):
        tried.append(tiling.many)
        return 1.0

    find(Shape(2, 4, 128, torch.bfloat16), small, Priced(few, many))
    assert len(set(tried)) > 20
    assert all(needed(blocks, 128, 2, small) <= small.shared for blocks in tried)


def test_steps_are_timed_whose_results_are_as_usual(device, shape):
    from infd.kernels.triton.tuning_attention import measured

    done = []
    cost = measured(shape, GPU, device, lambda work: done.append(work()) or 0.5, [[(40, 1)], [(9, 1)] * 3], [[(3, 20)]])
    usual = shape.default_tiling(GPU)
    assert cost.few(usual) == 1.0
    assert cost.few(replace(usual, few=OTHERS.few, programs=4)) == 1.0
    assert cost.many(replace(usual, many=OTHERS.many)) == 0.5
    assert cost.few(replace(usual, few=Blocks(16, 48, 4, 2))) is None  # Triton requires powers of two
    cost._many[0][1].add_(1.0)
    assert cost.many(usual) is None
    assert len(done) == 5


def test_tunings_are_found_by_gpu_kernels_and_shape(shape, tmp_path, monkeypatch):
    from infd.kernels.triton import tilings

    tilings.write(tilings.ATTENTION, tmp_path, GPU, {"another": OTHERS})
    tilings.write(tilings.ATTENTION, tmp_path, GPU, {shape.name: OTHERS})
    kept = tilings.read(tilings.ATTENTION, tmp_path, GPU)
    assert kept.keys() == {"another", "2 x 2 heads of 8, float32"}
    known = tilings.Tilings(GPU, kept)
    other = shape._replace(head=16)
    assert (known[shape], known[other]) == (OTHERS, other.default_tiling(GPU))
    assert known.requested == [shape, other]
    assert tilings.read(tilings.ATTENTION, tmp_path, GPU._replace(name="NVIDIA H200")) == {}
    monkeypatch.setattr(tilings.triton, "__version__", "0")
    assert tilings.read(tilings.ATTENTION, tmp_path, GPU) == {}


def test_an_unusable_tuning_file_is_reported_and_ignored(triton, tmp_path, caplog):
    from infd.kernels.triton import tilings

    tilings.write(tilings.ATTENTION, tmp_path, GPU, {}).write_text('{"x": 3}')
    assert tilings.read(tilings.ATTENTION, tmp_path, GPU) == {}
    assert "so the default tilings are used for attention: Expected" in caplog.text


@pytest.mark.parametrize("kept", ["truncated", "damaged", "of another form"])
def test_a_damaged_file_is_replaced_when_tilings_are_next_measured(triton, tmp_path, caplog, kept):
    from infd.kernels.triton import tilings

    path = tilings.write(tilings.EXPERTS, tmp_path, GPU, {"a": EXPERTS, "b": EXPERTS})
    whole = path.read_bytes()
    path.write_bytes({"truncated": whole[:-20], "damaged": b"\xff" + whole, "of another form": b'{"a": {}}'}[kept])
    assert tilings.write(tilings.EXPERTS, tmp_path, GPU, {"b": EXPERTS}) == path
    assert "so the default tilings are used for experts" in caplog.text
    assert tilings.read(tilings.EXPERTS, tmp_path, GPU) == {"b": EXPERTS}
    assert tilings.read(tilings.ATTENTION, tmp_path, GPU) == {}


def test_kernels_are_compiled_ahead_as_the_gpu_that_is_here_cuts(shape, tmp_path, monkeypatch):
    from infd.kernels.triton import blocks, tilings
    from infd.kernels.triton.compiled import compiling, target

    here, meta = torch.device("cuda", 0), torch.device("meta")
    monkeypatch.setattr(tilings, "directory", lambda: tmp_path)
    monkeypatch.setattr(blocks, "gpu", lambda device: GPU if device == here else Gpu())
    tilings.write(tilings.ATTENTION, tmp_path, GPU, {shape.name: OTHERS})
    with compiling(target("sm_90a"), here):
        assert tilings.tilings(tilings.ATTENTION, meta)[shape] == OTHERS
    with compiling(target("sm_89")):
        assert tilings.tilings(tilings.ATTENTION, meta).gpu == Gpu(shared=99 * 1024)
        assert tilings.tilings(tilings.ATTENTION, meta)[shape] == shape.default_tiling(GPU)


@pytest.mark.parametrize("programs", [1, 1000])
def test_attention_is_the_same_however_it_is_cut(device, shape, programs):
    from infd.kernels.triton.attention import PagedAttention
    from infd.kernels.triton.tilings import Tilings

    case = Case([(600, 1), (37, 50), (0, 3)], page_tokens=16, padding=1)
    expected = case.expected()
    case.move(device)
    measured = Tilings(GPU, {shape.name: replace(OTHERS, least_keys=128)})
    out = case.compute(PagedAttention(programs, measured)).cpu().double()
    assert [measured[shape].few.keys, *map(str, measured.requested)] == [128, str(shape)]
    torch.testing.assert_close(out[: len(expected)], expected, atol=2e-6, rtol=2e-6)


def test_measuring_needs_the_gpu_here(triton, capsys):
    with pytest.raises(SystemExit) as left:
        main(("warm", "--target", "sm_90a", "--tune"))
    assert left.value.code == 64
    assert "omit --target" in capsys.readouterr().err


def test_the_cheapest_tiling_of_experts_is_found(triton):
    from infd.kernels.triton.tuning_experts import find

    usual = MIXTURE.default_tiling(GPU)
    cost = Priced(lambda tiling: distance(tiling.few, EXPERTS.few), lambda tiling: distance(tiling.many, EXPERTS.many))
    found = find(MIXTURE, GPU, cost)
    assert found.tiling == EXPERTS
    assert found.few == pytest.approx(cost.few(EXPERTS) / cost.few(usual))
    cost = Priced(
        lambda tiling: 0.1 if tiling.few == EXPERTS.few else 1.0,
        lambda tiling: 1.0 if tiling.many == usual.many else 0.98,
        fails=[EXPERTS.few],
    )
    assert find(MIXTURE, GPU, cost).tiling == usual


def test_no_tile_of_experts_is_tried_that_a_gpu_cannot_hold(triton):
    from infd.kernels.triton.tuning_experts import find

    small, tried = GPU._replace(shared=64 * 1024), []

    def priced(tile):
        tried.append(tile)
        return 1.0

    find(MIXTURE, small, Priced(lambda tiling: priced(tiling.few), lambda tiling: priced(tiling.many)))
    assert len(set(tried)) > 20
    assert all(needed(tile, MIXTURE) <= small.shared for tile in tried)


@pytest.mark.parametrize(
    "stored",
    [
        (None, None),
        (Groups(4, 32, "I8", minima=True), Groups(8, 32, "I8")),
        (Groups(4, 32, "BF16", table="e2m1"), None),
        (Groups(8, 64, "F32", table="e4m3"), Groups(4, 32, "F16", zeros=True, order="x")),
    ],
    ids=str,
)
def test_steps_of_experts_are_timed_whose_results_are_as_usual(device, stored):
    from infd.kernels.triton.tuning_experts import measured

    done = []
    shape = MIXTURE._replace(gate_up=stored[0], down=stored[1])
    cost = measured(shape, GPU, device, lambda work: done.append(work()) or 0.5, (1, 2))
    usual = shape.default_tiling(GPU)
    assert cost.few(usual) == 1.0
    assert cost.many(usual) == 0.5
    assert cost.few(replace(usual, few=Tile(16, 32, 4, 2))) == 1.0
    assert cost.many(replace(usual, many=Tile(32, 64, 4, 1))) == 0.5
    assert cost.few(replace(usual, few=Tile(16, 48, 4, 2))) is None  # Triton requires powers of two
    assert [len(y) for y in done] == [1, 2, 65, 1, 2, 65]
    assert all(y.isfinite().all() and y.abs().max() > 1e-3 for y in done)


def test_experts_of_other_sizes_forms_and_types_have_other_tilings():
    others = [
        MIXTURE,
        MIXTURE._replace(experts=16),
        MIXTURE._replace(inner=64),
        MIXTURE._replace(dtype=torch.float16),
        MIXTURE._replace(down=Groups(4, 32, "BF16")),
        MIXTURE._replace(down=Groups(4, 32, "BF16", zeros=True)),
    ]
    assert len({shape.name for shape in others}) == len(others)
    assert MIXTURE.name == "8 experts of 64 x 32, 2 a token, bfloat16"
