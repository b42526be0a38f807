"""Adapters equal PEFT in float32: every target, every setting of rank and scale, many adapters in one batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.adapters.reading import AdapterReader
from infd.kernels.select import select
from infd.request import Adapter
from infd.runner.adapters import DeviceSlots
from infd.runner.staging import staging
from infd.scheduler.plan import Load
from tests.adapters.making import EVERY_PRODUCT, make
from tests.models.driving import Driver, Heap, load_model
from tests.tiny import VOCAB

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from infd.kernels.ops import Ops
    from infd.models.base import Model

CLOSE = 2e-4
LENGTH = 29


def text(seed: int) -> list[int]:
    return torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def off(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    difference = (ours - theirs).abs().max().item()
    return difference if difference == difference else float("inf")  # noqa: PLR0124 -- NaN counts as infinite


def expect(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].cpu()


class Bench:
    """infd's model, with adapter slots filled from directories."""

    def __init__(
        self, checkpoint: Path, device: torch.device, ops: Ops | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        self.ops = ops or select(device, dtype)
        self.device = device
        self.model: Model = load_model(checkpoint, ops=self.ops, dtype=dtype, device=device)
        cpu = torch.device("cpu")
        self.reader = AdapterReader(self.model.targets, dtype, lambda _: Heap(cpu))
        self.slots = DeviceSlots(self.ops.lora, staging(device))

    def hold(self, slot: int, directory: Path) -> None:
        weights = self.reader.read(str(directory), None, 2**30)
        adapter = Adapter("a", slot)
        self.slots.hold(adapter, weights.changes)
        self.slots.fill([Load(slot, adapter)])

    def driver(self) -> Driver:
        return Driver(self.model, ops=self.ops, seed=3, device=self.device, adapters=self.slots)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "q alone": ("llama", {"target_modules": ["q_proj"]}),
    "k alone": ("llama", {"target_modules": ["k_proj"]}),
    "v alone": ("llama", {"target_modules": ["v_proj"]}),
    "o alone": ("llama", {"target_modules": ["o_proj"]}),
    "gate alone": ("llama", {"target_modules": ["gate_proj"]}),
    "up alone": ("llama", {"target_modules": ["up_proj"]}),
    "down alone": ("llama", {"target_modules": ["down_proj"]}),
    "every product": ("qwen3", {"target_modules": "all-linear"}),
    "products with biases": ("llama-biases", {"target_modules": "all-linear"}),
    "the embedding": ("llama", {"target_modules": ["embed_tokens"]}),
    "the head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
    "an embedding that is the head too": ("llama-tied", {"target_modules": ["embed_tokens", "v_proj"]}),
    "a head that is the embedding too": ("qwen3-tied", {"target_modules": ["lm_head", "embed_tokens"]}),
    "a scaled embedding": ("gemma3", {"target_modules": ["embed_tokens", "down_proj"]}),
    "a scaled head": ("granite", {"target_modules": ["lm_head", "embed_tokens", *EVERY_PRODUCT]}),
    "a capped head": ("gemma2", {"target_modules": ["lm_head", "o_proj"]}),
    "fused products": ("phi3-window", {"target_modules": "all-linear"}),
    "fused gate and up": ("glm4", {"target_modules": "all-linear"}),
    "normed heads": ("olmo2", {"target_modules": "all-linear"}),
    "a decoder beside another tower": (
        "gemma3-seeing",
        {"target_modules": r".*language_model.*\.(q_proj|down_proj)"},
    ),
    "targets by pattern": ("llama", {"target_modules": r".*\.(1|2)\.self_attn\.[qv]_proj"}),
    "some layers": ("llama", {"layers_to_transform": [0, 2]}),
    "one layer": ("llama", {"layers_to_transform": 1, "layers_pattern": "layers"}),
    "rank 1": ("llama", {"r": 1}),
    "rank 256": ("llama", {"r": 256, "target_modules": ["q_proj", "down_proj"]}),
    "rslora": ("llama", {"use_rslora": True, "r": 9}),
    "alpha that is no integer": ("llama", {"lora_alpha": 2.5}),
    "ranks by module": ("llama", {"rank_pattern": {"q_proj": 7, "model.layers.1.mlp.up_proj": 3}}),
    "alphas by module": ("llama", {"alpha_pattern": {"^model.layers.0.self_attn.k_proj": 40, "down_proj": 1}}),
    "ranks and alphas by module, rslora": (
        "qwen3",
        {"use_rslora": True, "rank_pattern": {"o_proj": 2, "v_proj": 11}, "alpha_pattern": {"layers.1.mlp.up_proj": 3}},
    ),
}


def check_logits(bench: Bench, adapter: Path, theirs: PreTrainedModel) -> None:
    """Compare a text, chunked, with PEFT's logits. adapter: what made `theirs` of the bench's model."""
    bench.hold(1, adapter)
    driver = bench.driver()
    told = driver.start(text(1), slot=1)
    chunks = [driver.step((told, count))[0] for count in (7, 1, LENGTH - 8)]

    want = expect(theirs, text(1))
    plain = driver.step((driver.start(text(1)), LENGTH))[0]
    assert off(torch.cat(chunks), want) < CLOSE
    assert off(plain, want) > 100 * CLOSE, "the adapter is so weak that the test would not miss it"


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(tiny: Callable[[str], Path], tmp_path: Path, case: str, device: torch.device) -> None:
    variant, settings = CASES[case]
    check_logits(Bench(tiny(variant), device), tmp_path, make(tiny(variant), tmp_path, **settings))


def test_the_merged_model_gives_the_same_logits(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    theirs = make(tiny("qwen3"), tmp_path, target_modules="all-linear", use_rslora=True)
    bench = Bench(tiny("qwen3"), torch.device("cpu"))
    bench.hold(1, tmp_path)
    driver = bench.driver()
    (ours,) = driver.step((driver.start(text(2), slot=1), LENGTH))

    assert off(ours, expect(theirs.merge_and_unload(), text(2))) < CLOSE


def test_in_one_batch_each_sequence_has_its_own_adapter_or_none(
    tiny: Callable[[str], Path], tmp_path: Path, device: torch.device
) -> None:
    checkpoint = tiny("llama")
    models = {
        1: make(checkpoint, tmp_path / "1", seed=1, target_modules="all-linear"),
        2: make(checkpoint, tmp_path / "2", seed=2, r=9, target_modules=["q_proj", "embed_tokens", "lm_head"]),
        3: make(checkpoint, tmp_path / "3", seed=3, r=2, layers_to_transform=[1], use_rslora=True),
    }
    bench = Bench(checkpoint, device)
    for slot in models:
        bench.hold(slot, tmp_path / str(slot))
    driver = bench.driver()
    slots = (2, 0, 1, 3, 0, 1)
    told = [driver.start(text(seed), slot) for seed, slot in enumerate(slots)]
    parts = [driver.step(*((each, count) for each in told)) for count in (3, 1, 1, LENGTH - 5)]
    logits = [torch.cat(each) for each in zip(*parts, strict=True)]

    plain = bench.model
    for seed, slot in enumerate(slots):
        if slot:
            assert off(logits[seed], expect(models[slot], text(seed))) < CLOSE
    assert plain is driver.model
    for seed, slot in enumerate(slots):
        if not slot:
            alone = driver.step((driver.start(text(seed)), LENGTH))[0]
            assert off(logits[seed], alone) < CLOSE
    again = [(driver.start(text(seed), slot), LENGTH) for seed, slot in enumerate(slots)]
    for seed, last in enumerate(driver.step(*again, last=True)):
        assert off(last, logits[seed][-1:]) < CLOSE


def test_a_row_without_an_adapter_is_bit_identical_to_a_batch_without_adapters(
    tiny: Callable[[str], Path], tmp_path: Path, device: torch.device
) -> None:
    checkpoint = tiny("qwen3")
    make(checkpoint, tmp_path, target_modules=[*EVERY_PRODUCT, "embed_tokens", "lm_head"])
    bench = Bench(checkpoint, device)
    bench.hold(1, tmp_path)

    def answers(slot: int) -> list[Tensor]:
        driver = bench.driver()
        told = [driver.start(text(seed), slot if seed % 2 else 0) for seed in range(4)]
        return [
            logits
            for count in (5, 1, 1, 9)
            for seed, logits in enumerate(driver.step(*((each, count) for each in told)))
            if not seed % 2
        ]

    for with_neighbours, alone in zip(answers(1), answers(0), strict=True):
        assert torch.equal(with_neighbours, alone)


def test_a_step_without_adapters_calls_no_adapter_kernel(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    class Forbidden:
        def add(self, y: Tensor, x: Tensor, groups: object, upload: object) -> None:
            raise AssertionError("computed for nobody")

        add_rows = add

        def captured(self, size: int, device: torch.device) -> None:
            """None: on a CPU nothing is captured."""

    checkpoint = tiny("llama")
    make(checkpoint, tmp_path, target_modules=["q_proj"])
    bench = Bench(checkpoint, torch.device("cpu"))
    bench.slots = DeviceSlots(Forbidden(), staging(torch.device("cpu")))
    bench.hold(1, tmp_path)
    driver = bench.driver()
    driver.step((driver.start(text(1)), 5))
    with pytest.raises(AssertionError, match="computed for nobody"):
        driver.step((driver.start(text(1), slot=1), 5))
