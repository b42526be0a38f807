"""Every model against transformers, in float32, for several ways of cutting the tokens into steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace
from torch.nn import functional

from infd.kernels.reference.attention import PagedAttention
from infd.kernels.reference.dense import Activation, Norm, Rope
from infd.kernels.reference.experts import Experts
from infd.kernels.select import select
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.tiny import CLEAR, FAMILIES, FURTHER, VARIANTS, VOCAB, continuation, margins, oracle

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.ops import Ops
    from infd.models.base import Model

CLOSE = 1e-4
LENGTH = 41


def text(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def off(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference between logits of equal shapes."""
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    difference = (ours - theirs).abs().max().item()
    return difference if difference == difference else float("inf")  # noqa: PLR0124 -- NaN counts as infinite


class Pair:
    """One checkpoint, loaded by infd and by transformers."""

    def __init__(self, directory, *, ops=None, device=CPU):
        self.theirs = oracle(directory)
        self.device = device
        self.ops = ops or select(device, torch.float32)
        self.model = load_model(directory, ops=self.ops, device=device)

    def driver(self, page_tokens: int = 4) -> Driver:
        return Driver(self.model, ops=self.ops, page_tokens=page_tokens, seed=3, device=self.device)

    def expect(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            return self.theirs(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device(request.param)


EVERY = [pytest.param(each, marks=pytest.mark.exhaustive if each in FURTHER else ()) for each in sorted(VARIANTS)]


@pytest.fixture(scope="module", params=EVERY)
def pair(request, tiny, device):
    return Pair(tiny(request.param), device=device)


def test_a_prompt_computed_at_once(pair):
    driver = pair.driver()
    sequence = driver.start(text(1))
    assert off(driver.step((sequence, LENGTH))[0], pair.expect(text(1))) < CLOSE


@pytest.mark.parametrize("variant", sorted(FURTHER))
def test_a_further_variant(tiny, variant):
    pair = Pair(tiny(variant))
    driver = pair.driver()
    sequence = driver.start(text(1))
    logits = torch.cat([driver.step((sequence, count))[0] for count in (20, 1, 20)])
    assert off(logits, pair.expect(text(1))) < CLOSE


def test_a_prompt_computed_in_chunks(pair):
    driver = pair.driver()
    sequence = driver.start(text(1))
    logits = torch.cat([driver.step((sequence, count))[0] for count in (7, 1, 16, 2, 15)])
    assert off(logits, pair.expect(text(1))) < CLOSE


def test_one_token_at_a_time(pair):
    driver = pair.driver(page_tokens=16)
    sequence = driver.start(text(1))
    logits = torch.cat([driver.step((sequence, 1))[0] for _ in range(LENGTH)])
    assert off(logits, pair.expect(text(1))) < CLOSE


def test_other_sequences_in_the_batch_change_nothing(pair):
    driver = pair.driver()
    texts = [text(1), text(2, 30), text(3, 12), text(4, 40)]
    decoding, prompt, short, late = (driver.start(each) for each in texts)
    got: dict[int, list[Tensor]] = {1: [], 2: [], 3: [], 4: []}
    steps = [
        [(1, decoding, 20)],
        [(1, decoding, 1), (2, prompt, 13), (3, short, 1)],
        [(3, short, 1), (1, decoding, 1), (2, prompt, 17), (4, late, 5)],
        *[[(1, decoding, 1), (4, late, 1), (3, short, 1)]] * 10,
        [(4, late, 25), (1, decoding, 9)],
    ]
    for step in steps:
        for (name, _, _), logits in zip(step, driver.step(*(span[1:] for span in step)), strict=True):
            got[name].append(logits)
    for (name, parts), tokens in zip(got.items(), texts, strict=True):
        assert off(torch.cat(parts), pair.expect(tokens)) < CLOSE, f"sequence {name}"


def test_logits_of_wanted_positions_equal_those_among_all(pair):
    driver = pair.driver()
    texts = [text(1), text(2, 30), text(3, 12)]
    first, second, third = (driver.start(each) for each in texts)
    got = {
        (0, 20): driver.step((first, 20), last=True)[0],
        **dict(zip([(0, 40), (2, 5)], driver.step((first, 20), (third, 5), last=True), strict=True)),
        **dict(
            zip([(0, 41), (1, 30), (2, 12)], driver.step((first, 1), (second, 30), (third, 7), last=True), strict=True)
        ),
    }
    for (which, known), logits in got.items():
        assert off(logits, pair.expect(texts[which])[known - 1 : known]) < CLOSE


def test_greedy_choices_are_clear_almost_everywhere(pair):
    logits = torch.cat([pair.expect(text(seed, 64)) for seed in range(8)])
    assert (margins(logits) > CLEAR).float().mean() >= 0.99


def test_greedy_generation_equals_generate(pair):
    prompt = text(5, 11)
    theirs, _ = continuation(pair.theirs, prompt, 16)
    driver = pair.driver()
    sequence = driver.start(prompt)
    (logits,) = driver.step((sequence, len(prompt)))
    skipped = 0
    for expected in theirs:  # fed with the expected tokens, so that one unclear choice does not affect later ones
        if margins(logits[-1:]) > CLEAR:
            assert int(logits[-1].argmax()) == expected
        else:
            skipped += 1
        sequence.tokens.append(expected)
        (logits,) = driver.step((sequence, 1))
    assert skipped <= 1


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_bfloat16_stays_near_float32(tiny, variant):
    model = load_model(tiny(variant), dtype=torch.bfloat16)
    driver = Driver(model)
    (ours,) = driver.step((driver.start(text(1)), LENGTH))
    theirs = Pair(tiny(variant)).expect(text(1))
    # bfloat16 has 8 significant bits: errors are a few percent of logits with a range of 6.
    assert (ours - theirs).abs().mean() < 0.3
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.8


def compute(model: Model, ops: Ops | None = None) -> Tensor:
    driver = Driver(model, ops=ops, seed=3)
    sequence = driver.start(text(1))
    return torch.cat([driver.step((sequence, count))[0] for count in (20, 1, 20)])


class ForgetsTheOldestKey(PagedAttention):
    def prepare(self, batch):
        plan = super().prepare(batch)
        for part in plan._parts:
            if hasattr(part, "_seen"):
                part._seen[..., 0] = False
            else:
                for block in part._blocks:
                    block.seen[1:, 0] = False
        return plan


class WritesOneSlotLate(PagedAttention):
    def prepare(self, batch):
        plan = super().prepare(batch)
        plan._offset = (plan._offset + 1) % batch.page_tokens
        return plan


class ForgetsTheCap(PagedAttention):
    def prepare(self, batch):
        plan = super().prepare(batch)
        run = plan.run
        plan.run = lambda q, pages, *, scale, softcap, sinks: run(q, pages, scale=scale)
        return plan


class ForgetsSinks(PagedAttention):
    def prepare(self, batch):
        plan = super().prepare(batch)
        run = plan.run
        plan.run = lambda q, pages, *, scale, softcap, sinks: run(q, pages, scale=scale)
        return plan


class ForgetsTheCorrection(Experts):
    def route(self, x, router):
        return super().route(x, router._replace(correction=None))


class ForgetsGroups(Experts):
    def route(self, x, router):
        return super().route(x, router._replace(design=replace(router.design, groups=1)))


class SwapsExperts(Experts):
    def compute(self, x, routes, layer, changes=None):
        return super().compute(x, routes._replace(experts=routes.experts.flip(1)), layer, changes)


class ForgetsLimits(Experts):
    def compute(self, x, routes, layer, changes=None):
        return super().compute(x, routes, replace(layer, gating=replace(layer.gating, limit=float("inf"))), changes)


class ForgetsEps(Norm):
    def rms_norm(self, x, weight, eps, offset=0.0):
        return super().rms_norm(x, weight, 1e-3, offset)


class ForgetsTheOffset(Norm):
    def rms_norm(self, x, weight, eps, offset=0.0):
        return super().rms_norm(x, weight, eps)


class TurnsBackwards(Rope):
    def _rotate(self, x, cos, sin, interleaved):
        return super()._rotate(x, cos, -sin * 1.001, interleaved)


class TurnsTheOtherPart(Rope):
    def _rotate(self, x, cos, sin, interleaved):
        return super()._rotate(x.flip(-1), cos, sin, interleaved).flip(-1)


class PairsTheOtherWay(Rope):
    def _rotate(self, x, cos, sin, interleaved):
        return super()._rotate(x, cos, sin, not interleaved)


class TakesGeluAtItsWord(Activation):
    def gelu_tanh_mul(self, x):
        gate, up = x.chunk(2, dim=-1)
        return functional.gelu(gate) * up


# One variant of each architecture.
EACH = (*FAMILIES, "qwen2", "phi3-short", "gemma2", "gemma3-seeing", "olmo2", "glm4", "granite")


@pytest.mark.parametrize(
    ("variant", "family", "broken"),
    [
        *((variant, "attention", ForgetsTheOldestKey()) for variant in EACH),
        *((variant, "attention", WritesOneSlotLate()) for variant in EACH),
        *((variant, "norm", ForgetsEps()) for variant in EACH),
        *((variant, "rope", TurnsBackwards()) for variant in EACH),
        *((variant, "rope", PairsTheOtherWay()) for variant in EACH),
        ("phi3-short", "rope", TurnsTheOtherPart()),
        ("glm4", "rope", TurnsTheOtherPart()),
        ("gemma2", "attention", ForgetsTheCap()),
        ("gpt-oss", "attention", ForgetsSinks()),
        ("gpt-oss", "experts", ForgetsLimits()),
        ("glm4-moe", "experts", ForgetsTheCorrection()),
        ("glm4-moe", "experts", ForgetsGroups()),
        ("ernie-moe", "experts", ForgetsTheCorrection()),
        *((variant, "experts", SwapsExperts()) for variant in ("mixtral", "olmoe", "qwen2-moe", "gpt-oss", "phimoe")),
        ("gemma2", "norm", ForgetsTheOffset()),
        ("gemma3", "norm", ForgetsTheOffset()),
        ("gemma2", "activation", TakesGeluAtItsWord()),
        ("gemma3", "activation", TakesGeluAtItsWord()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_broken_kernel_is_noticed(tiny, variant, family, broken):
    ops = select(CPU, torch.float32).replace(**{family: broken})
    model = load_model(tiny(variant), ops=ops)
    assert off(compute(model, ops), Pair(tiny(variant)).expect(text(1))) > CLOSE


@pytest.mark.parametrize(
    ("variant", "changed"),
    [
        ("llama", {"rms_norm_eps": 1e-4}),
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama-rope3", {"rope_parameters": None}),
        ("mistral-window", {"sliding_window": 10}),
        ("qwen2", {"rope_parameters": None}),
        ("qwen2-windows", {"layer_types": ["full_attention"] * 3}),
        ("qwen2-windows", {"use_sliding_window": False}),
        ("phi3-window", {"sliding_window": 8}),
        ("phi3-long", {"original_max_position_embeddings": 256}),
        ("phi3-short", {"max_position_embeddings": 300}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 23}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
        ("gemma2", {"sliding_window": 10}),
        ("gemma3", {"final_logit_softcapping": None}),
        ("gemma3", {"query_pre_attn_scalar": 23}),
        ("gemma3", {"rope_parameters": None, "rope_theta": 5000.0, "rope_scaling": None}),
        ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 10_000.0}),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 1.0}}),
        ("qwen2-moe", {"norm_topk_prob": True}),
        ("qwen3-moe-norm", {"norm_topk_prob": False}),
        ("olmoe", {"num_experts_per_tok": 2}),
        ("glm4-moe", {"n_group": 1}),
        ("glm4-moe", {"norm_topk_prob": False}),
        ("glm4-moe", {"routed_scaling_factor": 1.6}),
        ("glm4-moe-biases", {"norm_topk_prob": True}),
        ("granite-moe", {"residual_multiplier": 0.61}),
        ("gpt-oss", {"swiglu_limit": 0.9}),
        ("gpt-oss", {"swiglu_alpha": 1.6}),
        ("gpt-oss", {"layer_types": ["full_attention"] * 3}),
        ("phimoe", {"router_jitter_noise": 0.1}),
        ("phimoe-rope", {"rope_parameters": None}),
        ("granite", {"embedding_multiplier": 2.9}),
        ("granite", {"attention_multiplier": 0.41}),
        ("granite", {"residual_multiplier": 0.61}),
        ("granite", {"logits_scaling": 2.4}),
    ],
    ids=str,
)
def test_a_setting_that_changes_the_model_is_read(tiny, variant, changed):
    model = load_model(tiny(variant), changed=changed)
    assert off(compute(model), Pair(tiny(variant)).expect(text(1))) > CLOSE


# By variant, its settings as a config.json from before transformers 5 spells them.
OLDER = {
    "llama-rope-linear": {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "mistral-window": {"rope_theta": 10_000.0, "rope_scaling": None},
    "qwen2": {
        "rope_theta": 10_000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        "sliding_window": 32768,
        "max_window_layers": 3,
    },
    "qwen2-windows": {"rope_theta": 10_000.0},
    "phi3-long": {
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "su", "short_factor": [1.0, 1.2, 1.4], "long_factor": [1.1, 2.0, 5.0]},
        "sliding_window": None,
    },
    "gemma2": {"rope_theta": 10_000.0, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "sliding_window_pattern": 3,
    },
    "glm4": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("variant", OLDER)
def test_an_older_file_describes_the_same_model(tiny, variant):
    newer = {"rope_parameters", "layer_types", "dtype"}
    changed = {**dict.fromkeys(newer), "torch_dtype": "float32", **OLDER[variant]}
    assert compute(load_model(tiny(variant), changed=changed)).equal(compute(load_model(tiny(variant))))
