"""`infd quantize`: what it writes is read by others, equals quantizing while loading, and is all or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from infd import embedded
from infd.cli import cli, main
from infd.errors import CheckpointError, OutputFailed, UsageError
from infd.quantize import convert as module
from infd.quantize.calibration import Experts, measure
from infd.quantize.convert import convert, require_measured
from infd.quantize.schemes import SCHEMES, quantize
from infd.weights.checkpoint import Checkpoint
from infd.weights.stored import EncodedTensor
from tests.quantize.serving import TOKENS, logits, names
from tests.tiny import make
from tests.weights.encodings.fixtures import WRITTEN, matrix

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


SMALL = "ct-w4a16-g32"  # its config and shapes: 160 and 224 inputs
# Error left by calibration, of the error of rounding to nearest. fp8 has a grid like its inputs', MXFP4 three scales.
GAINED = {"int4": 0.95, "int8": 0.98, "fp8": 0.999, "mxfp4": 0.995}
EACH = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of random bfloat16 weights, a row and a group of which are zeros."""
    directory = tmp_path_factory.mktemp("plain")
    config = json.loads((WRITTEN / SMALL / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "pytorch_model.bin").write_bytes(b"code")
    torch.manual_seed(11)
    tensors = {}
    with Checkpoint(WRITTEN / SMALL) as checkpoint:
        for name, stored in checkpoint.tensors.items():
            tensors[name] = torch.randn(stored.shape) * (1 if "norm" in name or "embed" in name else 0.1)
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    down[3], down[5, 32:64] = 0, 0
    save_file({name: each.bfloat16() for name, each in tensors.items()}, directory / "model.safetensors")
    return directory


@EACH
@pytest.mark.parametrize("vocabulary", ["none", "int8"])
def test_serving_it_equals_quantizing_while_loading_to_the_bit(
    built: None, scheme: str, vocabulary: str, plain: Path, tmp_path: Path
) -> None:
    convert(plain, tmp_path / "out", scheme)
    for dtype in (torch.bfloat16, torch.float32):
        written = logits(tmp_path / "out", "native", "none", vocabulary, dtype)
        online = logits(plain, "native", scheme, vocabulary, dtype)
        assert written.isfinite().all()
        assert written.equal(online), dtype
    assert not written.equal(logits(plain, "native", "none", vocabulary, torch.float32))


@pytest.mark.parametrize("scheme", ["fp8", "mxfp4"])
def test_without_native_code_a_written_checkpoint_equals_quantizing_while_loading(
    scheme: str, plain: Path, tmp_path: Path
) -> None:
    convert(plain, tmp_path / "out", scheme)
    written = logits(tmp_path / "out", "reference", "none", "none", torch.float32)
    assert written.equal(logits(plain, "reference", scheme, "none", torch.float32))


# Parameters of a matrix [outputs, inputs] that vLLM 0.33.0 declares (create_weights of the schemes W4A16, W8A8Int8,
# W8A8Fp8 and W4A4Mxfp4 in its compressed_tensors): a loader copies tensors of these names and shapes. vLLM holds int4's
# scales in the model's dtype.
VLLM = {
    "int4": lambda n, k: {
        "weight_packed": (torch.int32, (n, k // 8)),
        "weight_scale": (torch.bfloat16, (n, k // 32)),
        "weight_shape": (torch.int64, (2,)),
    },
    "int8": lambda n, k: {"weight": (torch.int8, (n, k)), "weight_scale": (torch.float32, (n, 1))},
    "fp8": lambda n, k: {"weight": (torch.float8_e4m3fn, (n, k)), "weight_scale": (torch.float32, (n, 1))},
    "mxfp4": lambda n, k: {"weight_packed": (torch.uint8, (n, k // 2)), "weight_scale": (torch.uint8, (n, k // 32))},
}


@EACH
def test_the_tensors_are_those_that_vllm_declares(scheme: str, plain: Path, tmp_path: Path) -> None:
    convert(plain, tmp_path / "out", scheme)
    written, source = load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in names(tmp_path / "out"):
        module = name.removesuffix("weight")
        found = {
            key.removeprefix(module): (each.dtype, tuple(each.shape))
            for key, each in written.items()
            if key.startswith(module)
        }
        assert found == VLLM[scheme](*source[name].shape), name


@EACH
def test_transformers_and_compressed_tensors_read_the_same_weights(scheme: str, plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    convert(plain, tmp_path / "out", scheme)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
        )
    theirs, source = model.state_dict(), load_file(plain / "model.safetensors")
    with Checkpoint(tmp_path / "out") as checkpoint:
        for name, stored in checkpoint.tensors.items():
            if isinstance(stored, EncodedTensor):
                ours = matrix(stored.encoding)
                # compressed-tensors computes in the scales' type.
                assert theirs[name].equal((ours.bfloat16() if scheme == "int4" else ours).float()), name
                assert (ours - source[name].float()).norm() < 0.13 * source[name].float().norm()
            else:
                assert theirs[name].equal(source[name].float()), name
    assert len(names(tmp_path / "out")) == 7
    assert model(torch.tensor([TOKENS])).logits.isfinite().all()


def test_the_copy_has_texts_but_no_other_weights(plain: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    written = convert(plain, tmp_path / "out", "int8", lambda *at: seen.append(at))
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert seen[-1] == (written.before, written.before)
    assert written.after == sum(each.nbytes for each in load_file(tmp_path / "out" / "model.safetensors").values())
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]


def test_a_checkpoint_in_files_stays_in_files(plain: Path, tmp_path: Path) -> None:
    tensors, parts = load_file(plain / "model.safetensors"), tmp_path / "parts"
    parts.mkdir()
    halves = sorted(tensors)[::2], sorted(tensors)[1::2]
    files = {name: f"model-{at}-of-2.safetensors" for at, half in enumerate(halves) for name in half}
    for at, half in enumerate(halves):
        save_file({name: tensors[name] for name in half}, parts / f"model-{at}-of-2.safetensors")
    (parts / "config.json").write_bytes((plain / "config.json").read_bytes())
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for source, out in ((plain, "a"), (parts, "b")):
        convert(source, tmp_path / out, "int4")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) == 2
    whole = [logits(tmp_path / out, "reference", "none", "none", torch.float32) for out in "ab"]
    assert whole[0].equal(whole[1])


def test_memory_holds_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Path) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        module, "quantize", lambda scheme, rows, by: sizes.append(rows.nbytes) or quantize(scheme, rows)
    )
    monkeypatch.setattr("infd.weights.formats.plain.CHUNK_BYTES", 2**15)
    convert(plain, tmp_path / "out", "int4")
    assert max(sizes) <= 2**15
    assert len(sizes) > 10  # for 7 matrices
    tracemalloc.start()
    convert(plain, tmp_path / "again", "int8")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


@EACH
def test_calibration_reduces_the_error_of_products(scheme: str) -> None:
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(64, 128, generator=generator) * torch.rand(64, 1, generator=generator)
    inputs = torch.randn(512, 128, generator=generator) * (torch.rand(128, generator=generator) * 3).exp()
    found = SCHEMES[scheme]

    def error(importance: Tensor | None) -> float:
        stored = quantize(found, rows, importance)
        scales = stored[".weight_scale"].float()
        if scheme == "mxfp4":
            scales = stored[".weight_scale"].int() - 127
        wrong = found.decoded(rows, scales.bfloat16() if scheme == "int4" else scales) - rows
        return (inputs @ wrong.T).norm().item()

    assert error(inputs.square().mean(0)) < GAINED[scheme] * error(None)


def test_a_text_calibrates_the_embedded_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"What is {a} plus {b}? {a} plus {b} is {a + b}." for a in range(30) for b in (3, 8)))
    found = CliRunner().invoke(
        cli,
        ["quantize", "embedded", str(tmp_path / "out"), "--scheme", "int4", "--calibration", str(text)],
        standalone_mode=False,
    )
    assert found.return_value == 0, found.exception
    assert "28 matrices in int4, 28 of them calibrated" in found.output
    convert(embedded.path(), tmp_path / "nearest", "int4")
    scales = [load_file(tmp_path / out / "model.safetensors") for out in ("out", "nearest")]
    name = "model.layers.0.mlp.down_proj.weight_scale"
    assert 0.05 < (scales[0][name] != scales[1][name]).float().mean() < 1
    text.write_text("too short")
    with pytest.raises(SystemExit) as stopped:
        main(["quantize", "embedded", str(tmp_path / "short"), "--scheme", "int4", "--calibration", str(text)])
    assert stopped.value.code == os.EX_DATAERR


def test_a_calibration_that_did_not_measure_each_matrix_is_refused(plain: Path) -> None:
    parts = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", *(f"self_attn.{each}_proj" for each in "qkvo"))
    measured = {f"layers.0.{part}.weight": torch.ones(1) for part in parts}
    require_measured(plain, "int8", measured)
    del measured["layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"1 of the 7 matrices to quantize, such as model\.layers\.0\.mlp\.up"):
        require_measured(plain, "int8", measured)


@pytest.mark.parametrize("variant", ["gemma3-seeing", "phi3-short"])
def test_calibration_measures_decoders_whose_prefix_transformers_changes(variant: str, tmp_path: Path) -> None:
    text, made = tmp_path / "text.txt", make(variant, tmp_path / "made", vocab_size=3072)
    text.write_text("What is one plus two? One plus two is three. " * 40)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.path() / name, made / name)
    importance = measure(made, text, lambda done, total: None)

    require_measured(made, "int8", importance)
    written = convert(made, tmp_path / "out", "int8", importance=importance)
    assert written.calibrated == written.matrices > 0
    convert(made, tmp_path / "nearest", "int8")
    scales = [load_file(tmp_path / out / "model.safetensors") for out in ("out", "nearest")]
    assert any(not scales[0][name].equal(scales[1][name]) for name in scales[0] if name.endswith("weight_scale"))


@pytest.mark.parametrize("variant", ["qwen2-moe", "mixtral", "granite-moe"])
def test_calibration_measures_experts(variant: str, tmp_path: Path) -> None:
    sizes = {"vocab_size": 3072, "num_hidden_layers": 1, "mlp_only_layers": [], "moe_intermediate_size": 32}
    text, made = tmp_path / "text.txt", make(variant, tmp_path / "made", **sizes, num_experts_per_tok=8)
    text.write_text("What is one plus two? One plus two is three. " * 20)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(embedded.path() / name, made / name)
    importance = measure(made, text, lambda done, total: None)

    require_measured(made, "int8", importance)
    written = convert(made, tmp_path / "out", "int8", importance=importance)
    assert written.calibrated == written.matrices > 3 * 8
    if variant == "qwen2-moe":  # each token chooses all experts, which read what shared experts read
        layer = "layers.0.mlp"
        shared, expert = (importance[f"{layer}.{each}.up_proj.weight"] for each in ("shared_expert", "experts.5"))
        torch.testing.assert_close(expert, shared)
        downs = [importance[f"{layer}.experts.{expert}.down_proj.weight"] for expert in (0, 1)]
        assert downs[0].shape == (32,)
        assert not downs[0].equal(downs[1])


def test_experts_that_few_tokens_choose_weigh_inputs_as_their_layer_does() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

    sizes = {"hidden_size": 6, "intermediate_size": 4, "num_local_experts": 3, "num_experts_per_tok": 1}
    module = MixtralExperts(MixtralConfig(**sizes))
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_()
    sums, states = Experts(module), torch.randn(2000, 6)
    states[:, 5] *= 9
    chosen = torch.zeros(2000, 1, dtype=torch.int64)
    chosen[:5] = 2
    with torch.inference_mode():
        module(states, chosen, torch.ones(2000, 1))
    found = sums.means("layers.0.mlp.experts")

    often, never, seldom = (found[f"layers.0.block_sparse_moe.experts.{e}.w1.weight"] for e in (0, 1, 2))
    mean = states.square().mean(0)
    torch.testing.assert_close(often, states[5:].square().mean(0), rtol=0.02, atol=0)
    torch.testing.assert_close(never, mean)
    torch.testing.assert_close(seldom, (states[:5].square().sum(0) + 16 * mean) / 21)
    assert found["layers.0.mlp.experts.1.down_proj.weight"].gt(0).all()


def test_a_model_that_pools_is_quantized_without_a_language_model_head(plain: Path, tmp_path: Path) -> None:
    headless = tmp_path / "headless"
    headless.mkdir()
    config = json.loads((plain / "config.json").read_text())
    family = config["architectures"][0].removesuffix("ForCausalLM")
    (headless / "config.json").write_text(json.dumps({**config, "architectures": [f"{family}Model"]}))
    tensors = {name: each for name, each in load_file(plain / "model.safetensors").items() if name != "lm_head.weight"}
    save_file(tensors, headless / "model.safetensors")
    convert(plain, tmp_path / "whole", "int8")
    convert(headless, tmp_path / "out", "int8")
    assert names(tmp_path / "out") == names(tmp_path / "whole")


def test_checkpoints_that_cannot_be_quantized_are_refused_before_a_file_is_written(plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("ct-w4a16-g32", "gptq-g32", "bnb-nf4"):
        with pytest.raises(CheckpointError, match=r"is quantized already \((compressed-tensors|gptq|bitsandbytes)\)"):
            convert(WRITTEN / name, out, "int8")
    odd = tmp_path / "odd"
    odd.mkdir()
    config = json.loads((plain / "config.json").read_text())
    tensors = load_file(plain / "model.safetensors")
    for name in tensors:
        if "mlp" in name:
            cut = tensors[name][:210] if "down" not in name else tensors[name][:, :210]
            tensors[name] = cut.contiguous()
    save_file(tensors, odd / "model.safetensors")
    (odd / "config.json").write_text(json.dumps({**config, "intermediate_size": 210}))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight has 210 inputs.* groups of 32; choose int8 or fp8"):
        convert(odd, out, "mxfp4")
    (odd / "config.json").write_text(json.dumps({**config, "architectures": ["FalconForCausalLM"]}))
    with pytest.raises(CheckpointError, match="FalconForCausalLM"):
        convert(odd, out, "int8")
    out.mkdir()
    with pytest.raises(UsageError, match="exists; name a directory that does not"):
        convert(plain, out, "int8")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["odd", "out"]


def test_weights_that_are_not_finite_are_named(plain: Path, tmp_path: Path) -> None:
    tensors, bad = load_file(plain / "model.safetensors"), tmp_path / "bad"
    bad.mkdir()
    tensors["model.layers.0.mlp.up_proj.weight"][7, 7] = torch.inf
    save_file(tensors, bad / "model.safetensors")
    (bad / "config.json").write_bytes((plain / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: some weights are not finite"):
        convert(bad, tmp_path / "out", "fp8")
    assert [each.name for each in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_leaves_nothing(call: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutputFailed, match="out cannot be written: No space left on device"):
        convert(plain, tmp_path / "out", "int4")
    assert not list(tmp_path.iterdir())


def test_a_stopped_run_leaves_nothing(plain: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plain, tmp_path / "out", "int4", stop)
    assert not list(tmp_path.iterdir())


@EACH
def test_experts_are_quantized_one_by_one_and_read_back_to_the_bit(built: None, scheme: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "mlp_only_layers": [0], "head_dim": 16}
    checkpoint = make("qwen2-moe", tmp_path / "plain", **sizes, shared_expert_intermediate_size=32)
    written = convert(checkpoint, tmp_path / "out", scheme)
    found = names(tmp_path / "out")
    experts = {
        f"model.layers.1.mlp.experts.{n}.{part}_proj.weight" for n in range(8) for part in ("gate", "up", "down")
    }
    assert found >= experts
    assert len(found) == written.matrices == 2 * 4 + 3 + len(experts) + 4
    ours = logits(tmp_path / "out", "native", "none", "none", torch.float32)
    assert ours.equal(logits(checkpoint, "native", scheme, "none", torch.float32))
    assert not ours.equal(logits(checkpoint, "native", "none", "none", torch.float32))
    if scheme == "int8":
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["quantization_config"]["ignore"] == ["lm_head", "model.layers.1.mlp.gate"]
