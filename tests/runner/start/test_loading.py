from __future__ import annotations

import json
import logging
import shutil
from types import MappingProxyType

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from infd.config import CacheConfig, Config, DeviceConfig, ModelConfig, SchedulerConfig
from infd.errors import CheckpointError, ConfigError, DeviceMissing, OutOfMemory
from infd.kernels.select import CANDIDATES
from infd.runner.pulse import Pulse
from infd.runner.start import loading, resolve, trial
from infd.runner.start.loading import build
from infd.runner.start.resolve import choose_dtype
from infd.runner.start.setup import choose_device
from infd.scheduler.layout import CacheLayout, PageGroup
from tests.native import kernels
from tests.runner.driving import config, load
from tests.runner.fake_model import FakeModel
from tests.weights.encodings.fixtures import WRITTEN

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("stored", "flags", "expected"),
    [
        ("bfloat16", "avx2 avx512_bf16", "bfloat16"),
        ("float16", "amx_bf16", "bfloat16"),
        ("bfloat16", "avx2 avx512f", "float32"),
        ("float32", "avx512_bf16", "float32"),
    ],
)
def test_half_types_stay_half_on_a_cpu_that_is_fast_at_them(monkeypatch, tmp_path, stored, flags, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nflags\t\t: fpu {flags} sse\n")
    monkeypatch.setattr(resolve, "CPUINFO", cpuinfo)
    assert choose_dtype("auto", {"torch_dtype": stored}, "cpu") == expected


@pytest.mark.parametrize(("flags", "expected"), [("avx512_bf16", "bfloat16"), ("avx512f", "float32")])
def test_encoders_in_float32_are_computed_in_bfloat16_on_a_cpu_that_is_fast_at_it(
    monkeypatch, tmp_path, flags, expected
):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr(resolve, "CPUINFO", cpuinfo)
    encoder = {"architectures": ["BertModel"], "torch_dtype": "float32"}

    assert choose_dtype("auto", encoder, "cpu") == expected
    assert choose_dtype("float32", encoder, "cpu") == "float32"
    assert choose_dtype("auto", encoder, "cuda") == "float32"
    assert choose_dtype("auto", encoder, None) is None


def test_a_gpu_takes_the_type_of_the_checkpoint():
    assert choose_dtype("auto", {"dtype": "float16"}, "cuda") == "float16"
    assert choose_dtype("auto", {}, "cuda") == "float32"


def test_a_configured_dtype_is_used():
    assert choose_dtype("float16", {"dtype": "bfloat16"}, "cpu") == "float16"
    assert (choose_dtype("half", {}, "cpu"), choose_dtype("float", {"dtype": "float16"}, None)) == (
        "float16",
        "float32",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_missed_by_name():
    assert choose_device("auto") == CPU
    with pytest.raises(DeviceMissing, match="cuda"):
        choose_device("cuda")


def test_one_gpu_of_several_is_taken_by_its_number_and_becomes_the_threads_own(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert [choose_device(kind) for kind in ("cuda:1", "cuda", "auto")] == [torch.device("cuda", n) for n in (1, 0, 0)]
    assert taken == [1, 0, 0]
    with pytest.raises(DeviceMissing, match="'cuda:2', but the last of 2 GPUs is cuda:1"):
        choose_device("cuda:2")


TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
HEADS = {**TENSOR, "strategy": "attn_head"}


def settings(path, **model) -> Config:
    return Config(
        model=ModelConfig(path=str(path), dtype="float32", **model),
        device=DeviceConfig(kind="cpu", threads=1),
        scheduler=SchedulerConfig(max_num_seqs=2, step_tokens=32),
        cache=CacheConfig(bytes=2**20, page_tokens=4),
    )


def with_cache_scales(source, directory, scales, *, groups=MappingProxyType({}), scheme=TENSOR):
    """Return a copy of a checkpoint, calibrated as compressed-tensors does it for a cache alone: its first layer.

    groups  of modules, as llm-compressor writes them where it has calibrated the whole of attention
    """
    copy = shutil.copytree(source, directory / "model")
    held = load_file(copy / "model.safetensors")
    held |= {f"model.layers.0.self_attn.{name}": scale.clone() for name, scale in scales.items()}
    save_file(held, copy / "model.safetensors")
    described = json.loads((copy / "config.json").read_text())
    described["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": dict(groups),
        "kv_cache_scheme": scheme,
    }
    (copy / "config.json").write_text(json.dumps(described))
    return copy


def test_a_context_beyond_the_models_own_is_refused(tiny):
    with pytest.raises(ConfigError, match="512"):
        build(settings(tiny("qwen3"), max_model_len=513), Pulse())


def test_exact_activations_exclude_weights_that_are_quantized_while_loading(tiny):
    with pytest.raises(ConfigError, match=r"model\.exact_activations.*--quantization int4"):
        build(settings(tiny("qwen3"), exact_activations=True, quantization="int4"), Pulse())


@pytest.mark.parametrize(
    ("exact", "told"), [(False, "kept"), (True, "decoded: products with it would quantize activations")]
)
def test_stored_integers_are_kept_unless_activations_are_to_be_exact(built, exact, told, caplog):
    caplog.set_level(logging.INFO, "infd")
    loaded = build(settings(WRITTEN / "gptq-desc-act", exact_activations=exact), Pulse())
    assert [(label.rpartition(", ")[2], count) for label, count in loaded.residence.stored.items()] == [(told, 6)]
    chosen = {row["family"]: row["chosen"] for row in loaded.facts["ops"]}
    assert chosen["packed"] == ("native exact" if exact else "native packed")
    assert any("quantize activations to int8" in text for text in caplog.messages) is not exact


@pytest.mark.parametrize(("compress", "chosen"), [(True, "native compressed"), (False, "native")])
def test_matrices_are_compressed_unless_the_setting_forbids_it(built, tiny, compress, chosen):
    kernels("avx512_bf16")
    wanted = settings(tiny("qwen3"), compress=compress)
    model = msgspec.structs.replace(wanted.model, dtype="bfloat16")
    loaded = build(msgspec.structs.replace(wanted, model=model), Pulse())
    loaded.residence.close()
    families = {row["family"]: row["chosen"] for row in loaded.facts["ops"]}
    assert (families["linear"], families["vocabulary"]) == (chosen, chosen)


def test_a_cache_of_int8_holds_more_tokens_in_the_same_bytes(built, tiny, caplog):
    caplog.set_level(logging.INFO, "infd")
    plain = settings(tiny("qwen3"))
    small = msgspec.structs.replace(plain, cache=msgspec.structs.replace(plain.cache, dtype="int8"))
    wide, narrow = build(plain, Pulse()), build(small, Pulse())
    head = json.loads((tiny("qwen3") / "config.json").read_text())["head_dim"]
    assert (wide.facts["cache_dtype"], narrow.facts["cache_dtype"]) == ("float32", "int8")
    assert narrow.capacity.pages / wide.capacity.pages == pytest.approx(4 * head / (4 + head), rel=0.01)
    assert [" of int8 (as configured)" in text for text in caplog.messages if text.startswith("cache:")] == [
        False,
        True,
    ]
    for loaded in (wide, narrow):
        loaded.residence.close()


def of_cache(plain, dtype):
    return msgspec.structs.replace(plain, cache=msgspec.structs.replace(plain.cache, dtype=dtype))


def test_a_cache_may_be_asked_for_by_the_name_of_the_models_own_type(tiny):
    plain = settings(tiny("qwen3"))
    unsaid, named = build(plain, Pulse()), build(of_cache(plain, "float32"), Pulse())
    told = ("cache_dtype", "cache_bytes", "quantization", "ops")
    assert [named.facts[name] for name in told] == [unsaid.facts[name] for name in told]
    assert named.capacity.pages == unsaid.capacity.pages
    for loaded in (unsaid, named):
        loaded.residence.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cache_of_another_float_is_refused_by_the_kernels_that_do_not_keep_it(tiny, dtype):
    with pytest.raises(
        ConfigError, match=rf"^cache.dtype: .* supports '{dtype}' on cpu .*float32: native: .*; reference: "
    ):
        build(of_cache(settings(tiny("qwen3")), dtype), Pulse())


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_a_cache_of_8_bit_floats_is_as_small_as_its_name_says_and_may_be_divided_by_the_checkpoints_numbers(
    tiny, tmp_path, caplog, name
):
    caplog.set_level(logging.INFO, "infd")
    plain = settings(
        with_cache_scales(tiny("qwen3"), tmp_path, {"k_scale": torch.tensor(0.5), "v_scale": torch.ones(2)})
    )
    small = of_cache(plain, name)
    wide, narrow = build(plain, Pulse()), build(small, Pulse())
    assert (wide.facts["cache_dtype"], narrow.facts["cache_dtype"]) == ("float32", "fp8")
    assert narrow.capacity.pages / wide.capacity.pages == pytest.approx(4, rel=0.01)
    assert [" of fp8 (as configured)" in text for text in caplog.messages if text.startswith("cache:")] == [False, True]
    first, second, *_ = (pages.scales for pages in narrow.runner.instance.cache)
    assert (first.tolist(), second.tolist()) == ([[0.5, 0.5], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert all(pages.scales is None for pages in wide.runner.instance.cache)
    for loaded in (wide, narrow):
        loaded.residence.close()


ONE, EACH = torch.tensor([0.5]), torch.full((2, 1, 1), 0.5)  # for all heads, for each
PER_TENSOR = {"q_scale": ONE, "k_scale": ONE, "v_scale": ONE}
PER_HEAD = {"q_scale": torch.full((4, 1, 1), 0.5), "k_scale": EACH, "v_scale": EACH}


@pytest.mark.parametrize("cache", ["auto", "fp8"])
@pytest.mark.parametrize("prefix", ["", "attn."])
@pytest.mark.parametrize(("scales", "scheme"), [(PER_TENSOR, TENSOR), (PER_HEAD, HEADS)])
def test_query_scales_are_ignored_and_logged_once(tiny, tmp_path, caplog, scales, scheme, prefix, cache):
    caplog.set_level(logging.INFO, "infd")
    group = {"targets": ["Qwen3Attention"], "weights": None, "input_activations": scheme, "output_activations": None}
    scales = {prefix + name: scale for name, scale in scales.items()}
    plain = settings(with_cache_scales(tiny("qwen3"), tmp_path, scales, groups={"attention": group}, scheme=scheme))

    loaded = build(msgspec.structs.replace(plain, cache=msgspec.structs.replace(plain.cache, dtype=cache)), Pulse())

    (told,) = (text for text in caplog.messages if "scales" in text)
    unused = 1 if cache == "fp8" else 3
    assert told.startswith(f"{unused} scales of the checkpoint, such as model.layers.0.self_attn.{prefix}")
    held = loaded.runner.instance.cache[0].scales
    assert held is None if cache == "auto" else held.tolist() == [[0.5, 0.5], [0.5, 0.5]]
    loaded.residence.close()


@pytest.mark.parametrize(
    "group",
    [
        {"targets": ["Linear"], "weights": None, "input_activations": TENSOR},
        {"targets": []},
        {},
        "all",
    ],
)
def test_a_group_that_infd_cannot_read_is_refused(tiny, tmp_path, group):
    directory = with_cache_scales(tiny("qwen3"), tmp_path, PER_TENSOR, groups={"group_0": group})
    with pytest.raises(CheckpointError, match=r"config\.json: quantization_config: .*config_groups"):
        build(settings(directory), Pulse())


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(1)}, r"k_scale: expected one number, or 2, found \[3\]"),
        ({"k_scale": torch.ones(1), "v_scale": torch.zeros(1)}, r"v_scale: a cache's scale cannot be \[0.0\]"),
        ({"k_scale": torch.ones(1)}, r"k_scale: left over"),
    ],
)
def test_numbers_that_no_cache_can_be_divided_by_are_the_checkpoints_fault(tiny, tmp_path, scales, message):
    plain = settings(with_cache_scales(tiny("qwen3"), tmp_path, scales))
    with pytest.raises(CheckpointError, match=message):
        build(msgspec.structs.replace(plain, cache=msgspec.structs.replace(plain.cache, dtype="fp8")), Pulse())


def test_an_impossible_config_json_is_refused_with_its_directory(tiny, tmp_path):
    described = json.loads((tiny("qwen3") / "config.json").read_text())

    def build_with(**changes: object) -> None:
        copy = shutil.copytree(tiny("qwen3"), tmp_path / "model", dirs_exist_ok=True)
        (copy / "config.json").write_text(json.dumps(described | changes))
        build(settings(copy), Pulse())

    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/model: config.json: .* 'Nonsense' is not supported"):
        build_with(architectures=["Nonsense"])
    with pytest.raises(CheckpointError, match=r"max_position_embeddings is 1; a prompt and an answer need 2"):
        build_with(max_position_embeddings=1)


def test_weights_that_are_not_finite_are_the_checkpoints_fault(tiny, tmp_path):
    copy = shutil.copytree(tiny("qwen3"), tmp_path / "model")
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, copy / "model.safetensors")

    with pytest.raises(
        CheckpointError, match=rf"^{copy}: the first step failed: .* not finite; the weights are damaged"
    ):
        build(settings(copy), Pulse())


def test_a_cache_that_cannot_exist_names_the_setting_to_lower():
    huge = Config(device=DeviceConfig(kind="cpu", threads=1), cache=CacheConfig(bytes=2**62, page_tokens=4))
    with pytest.raises(OutOfMemory, match=r"no memory for cache: .*lower cache\.bytes"):
        load(FakeModel(), huge, Pulse())


def test_a_shorter_context_can_be_asked_for(tiny):
    loaded = build(settings(tiny("qwen3"), max_model_len=100), Pulse())
    assert loaded.capacity.max_model_len == 100
    assert loaded.facts["arch"] == "Qwen3ForCausalLM"
    assert loaded.facts["weights_bytes"] > 0
    absent = {"packed", "experts", "inputs", "span_attention", "encoder", "encoder_linear", "table", "pooling"}
    assert [row["family"] for row in loaded.facts["ops"]] == sorted({*CANDIDATES} - absent)


def test_reading_the_weights_reports_progress_and_beats_the_watchdog(tiny):
    told, pulse = [], Pulse()
    build(settings(tiny("qwen3")), pulse, lambda done, total: told.append((done, total, pulse.count)))
    done, totals, beats = zip(*told, strict=True)
    assert done == tuple(sorted(done))
    assert {done[-1]} == set(totals)
    assert beats == tuple(range(1, len(told) + 1))


def test_lowering_the_context_to_the_cache_is_logged(caplog):
    caplog.set_level(logging.WARNING)
    loaded = load(FakeModel(), config(), Pulse(), max_len=5000)  # 2**16 bytes in pages of 64
    assert loaded.capacity.max_model_len == 4 * loaded.capacity.pages < 5000
    assert "lowered from 5000" in caplog.text


def test_step_tokens_are_measured_within_bounds_and_the_trial_leaves_no_trace():
    measured = Config(
        device=DeviceConfig(kind="cpu", threads=1),
        scheduler=SchedulerConfig(max_num_seqs=40, step_target_ms=0.001),
        cache=CacheConfig(bytes=2**18, page_tokens=4),
    )
    loaded = load(FakeModel(), measured, Pulse())
    assert loaded.capacity.step_tokens == 128  # for 40 decoding sequences and prompts beside them


# Shortest steps that take 60 ms, and 2 ms for each token beyond 16.
def test_a_step_that_streams_wait_for_takes_1_75_times_as_long_as_the_shortest(monkeypatch):
    run = trial.run

    def seconds(runner, plan):
        run(runner, plan)
        return 0.06 + 0.002 * max(0, plan.tokens - 16)

    monkeypatch.setattr(trial, "run", seconds)
    sizes = {}
    for target_ms, step_tokens in ((None, None), (90.0, None), (None, 512), (None, 24)):
        settings = Config(
            device=DeviceConfig(kind="cpu", threads=1),
            scheduler=SchedulerConfig(max_num_seqs=8, step_target_ms=target_ms, step_tokens=step_tokens),
            cache=CacheConfig(bytes=2**20, page_tokens=4),
        )
        held = load(FakeModel(), settings, Pulse(), max_len=200).capacity
        sizes[target_ms, step_tokens] = held.step_tokens, held.mixed_tokens, held.crowded_tokens
    # 156 ms are taken by 64 tokens, 150 by 61, 105 by 38, 90 by 31.
    assert sizes == {
        (None, None): (64, 32, 56),
        (90.0, None): (64, 24, 24),
        (None, 512): (512, 32, 56),
        (None, 24): (24, 24, 24),
    }


def test_the_cost_of_a_scored_token_is_measured_by_scoring_some(monkeypatch):
    run = trial.run

    def seconds(runner, plan):
        run(runner, plan)
        return plan.tokens + 3 * sum(span.scores for span in plan.spans)

    monkeypatch.setattr(trial, "run", seconds)
    assert load(FakeModel(), config(step_tokens=64), Pulse()).capacity.score_cost == 4


def test_step_tokens_as_configured_are_not_measured():
    assert load(FakeModel(), config(step_tokens=8), Pulse()).capacity.step_tokens == 8


LAYOUTS = [
    CacheLayout(()),
    CacheLayout((PageGroup(layers=(0,), page_tokens=4),)),
    CacheLayout((PageGroup(layers=(0,), page_tokens=4), PageGroup(layers=(1,), page_tokens=8, window=5))),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pages", [3, 17, 100])
def test_a_trial_plan_is_one_that_a_scheduler_could_have_made(layout, pages):
    plans = trial.TrialPlans(layout, pages=pages, rows=3, max_model_len=20)
    for tokens in {1, 4, plans.room // 2, plans.room}:
        plan = plans.plan(tokens)
        assert plan.tokens == tokens
        held = [page for join in plan.joins for table in join.tables for page in table]
        assert len(set(held)) == len(held)
        assert all(1 <= page <= pages for page in held)
        assert [join.row for join in plan.joins] == list(range(len(plan.joins)))
        assert len(plan.joins) <= 3
        for join, span in zip(plan.joins, plan.spans, strict=True):
            assert span.start + span.count < 20
            for group, table in zip(layout.groups, join.tables, strict=True):
                assert len(table) * group.page_tokens >= span.count


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_a_gpu_is_warmed_up_by_prompts_in_parts_and_every_way_to_choose(tiny, monkeypatch, variant):
    ran = []
    run = trial.run

    sampling = {}

    def note(runner, plan):
        sampling.update({join.row: join.wants[0].sampling for join in plan.joins})
        (each,) = plan.spans
        asked = sampling[each.row]
        ran.append((each.start, each.count, asked.temperature, asked.top_p))
        return run(runner, plan)

    monkeypatch.setattr(trial, "run", note)
    monkeypatch.setattr(trial, "LENGTHS", (40, 16))
    first_steps = trial.first_steps
    monkeypatch.setattr(trial, "first_steps", lambda plans, _: first_steps(plans, "cuda"))
    loading.build(
        Config(
            model=ModelConfig(path=str(tiny(variant)), dtype="float32"),
            device=DeviceConfig(kind="cpu", threads=1),
            scheduler=SchedulerConfig(max_num_seqs=2, step_tokens=64),
            cache=CacheConfig(bytes=2**20, page_tokens=4),
        ),
        Pulse(),
    )
    greedy, random, limited = (0.0, 1.0), (1.0, 1.0), (1.0, 0.9)
    lengths = [(greedy, 40), (greedy, 16), (random, 4), (limited, 4)]
    bounds = {40: (26, 39), 16: (10, 15), 4: (2, 3)}
    assert ran[1:13] == [
        part
        for way, length in lengths
        for first, last in [bounds[length]]
        for part in ((0, first, *way), (first, last - first, *way), (last, 1, *way))
    ]
