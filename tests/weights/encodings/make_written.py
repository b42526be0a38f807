"""Write the checkpoints of `written/` with other software, and record that software's results.

    python make_written.py llmcompressor|modelopt|bitsandbytes|plain|gptqmodel [NAME...]

llmcompressor, modelopt, bitsandbytes and plain: torch 2.13.0, transformers 5.17.0, llmcompressor 0.14.0.1,
compressed-tensors 0.19.0, nvidia-modelopt 0.47.0, bitsandbytes 0.50.2. gptqmodel: 7.7.0, in an environment of its own.

A directory has config.json and model.safetensors as the writer left them, and expected.safetensors: `logits` (computed
in float32) and `half` (computed in bfloat16) of `tokens` by transformers' plain model with the dequantized weights; its
metadata has the SHA-256 of each dequantized matrix, and the dtype of its numbers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

HERE = Path(__file__).parent / "written"
SIZES = {
    "vocab_size": 64, "hidden_size": 160, "intermediate_size": 224, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
WIDE = {"hidden_size": 384, "intermediate_size": 512, "num_key_value_heads": 1}  # three groups of 128 and more
IGNORED = ["lm_head", "re:.*o_proj"]
SCALES = {"q_proj": 1.0, "k_proj": 0.25, "v_proj": 3.0}


def base(directory: Path, **sizes) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(Qwen3Config(**{**SIZES, **sizes}), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.normal_(1.0, 0.2)
            elif "embed" in name:
                tensor.normal_()
            else:
                part = name.split(".")[-2]
                tensor.normal_(0, SCALES.get(part, 1.0) * tensor.shape[1] ** -0.5)
                if tensor.shape[0] > 1:  # scales that differ by row, by group and by block
                    tensor.mul_(torch.rand(tensor.shape[0], 1) + 0.2)
                    tensor.mul_((torch.rand(1, tensor.shape[1] // 32) + 0.2).repeat_interleave(32, 1))
        model.model.norm.weight.mul_(6)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def tokens(rows: int = 8, length: int = 24) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(9))


def batches():
    return [{"input_ids": row[None], "attention_mask": torch.ones(1, 24, dtype=torch.long)} for row in tokens()]


def record(name: str, written: Path, weights: dict[str, torch.Tensor]) -> None:
    """weights: the dequantized matrices by name, in the dtype that the reference computes them in."""
    out = HERE / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    for file in ("config.json", "hf_quant_config.json", "model.safetensors"):
        if (written / file).exists():
            shutil.copy(written / file, out)
    described = json.loads((out / "config.json").read_text())
    described.pop("quantization_config", None)
    config = AutoConfig.for_model(**described)
    stored = load_file(out / "model.safetensors")
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for key, tensor in plain.state_dict().items():
        value = weights[key] if key in weights else stored.get(key, stored.get("model.embed_tokens.weight"))
        assert value.shape == tensor.shape, (key, value.shape, tensor.shape)
        tensor.copy_(value.float())
    ids = tokens(1)
    with torch.no_grad():
        logits = plain(ids).logits[0]
        half = plain.to(torch.bfloat16)(ids).logits[0].float()
    told = {key: f"{str(w.dtype).removeprefix('torch.')} {digest(w)}" for key, w in weights.items()}
    save_file(
        {"tokens": ids[0], "logits": logits.contiguous(), "half": half.contiguous()},
        out / "expected.safetensors",
        metadata=told,
    )
    size = sum(file.stat().st_size for file in out.iterdir())
    print(
        f"{name}: {len(weights)} matrices, {size // 1000} kB, bf16 to f32 {(half - logits).norm() / logits.norm():.4f}",
        flush=True,
    )


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def quantized(written: Path) -> set[str]:
    """Modules whose weight is not stored as plain numbers."""
    plain = {"BF16", "F16", "F32"}
    from safetensors import safe_open

    with safe_open(written / "model.safetensors", "pt") as file:
        kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118 - the file is no dict
    modules = {key.rpartition(".")[0] for key in kinds if "layers" in key or "lm_head" in key}
    return {
        m for m in modules if kinds.get(f"{m}.weight") not in plain and "norm" not in m and m.endswith(("proj", "head"))
    }


def decompressed(written: Path) -> dict[str, torch.Tensor]:
    from transformers import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        written, dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(run_compressed=False)
    )
    state = model.state_dict()
    return {f"{m}.weight": state[f"{m}.weight"] for m in sorted(quantized(written))}


def llmcompressor(name: str, *, sizes=None, ignore=IGNORED, tied=False, **how) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    with tempfile.TemporaryDirectory() as room:
        plain = base(Path(room) / "base", **(sizes or {}), tie_word_embeddings=tied)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        kind = GPTQModifier if how.pop("gptq", False) else QuantizationModifier
        if "scheme" in how:
            how["targets"] = "Linear"
        data = Dataset.from_dict({"input_ids": tokens().tolist(), "attention_mask": [[1] * 24] * 8})
        oneshot(
            model=model,
            recipe=kind(ignore=ignore, **how),
            dataset=data,
            num_calibration_samples=8,
            max_seq_length=24,
            tokenizer=tokenizer(),
        )
        written = Path(room) / "written"
        model.save_pretrained(written, save_compressed=True)
        record(name, written, decompressed(written))


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0")), pad_token="t0"
    )


def group(targets, weights, inputs=None, format=None):
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    return QuantizationScheme(
        targets=targets,
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**inputs) if inputs else None,
        **({"format": format} if format else {}),
    )


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
CHANNEL = {"strategy": "channel", "group_size": None}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
STATIC = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False, "dynamic": False}


def one(weights, inputs=None):
    return lambda: {"group_0": group(["Linear"], weights, inputs)}


def mixed():
    return {
        "group_0": group(
            ["re:.*self_attn.*"],
            {**FLOAT8, "strategy": "channel"},
            {**FLOAT8, "strategy": "token", "dynamic": True},
        ),
        "group_1": group(["re:.*(gate|up)_proj"], INT4),
        "group_2": group(["re:.*down_proj"], INT8),
    }


LLMCOMPRESSOR = {
    "ct-w4a16-g128": {"scheme": "W4A16", "sizes": WIDE},
    "ct-w4a16-g32": {"config_groups": one(INT4)},
    "ct-w4a16-asym-g32": {"config_groups": one({**INT4, "symmetric": False})},
    "ct-w4a16-channel": {"config_groups": one({**INT4, **CHANNEL})},
    "ct-w4a16-asym-channel": {"config_groups": one({**INT4, **CHANNEL, "symmetric": False})},
    "ct-w4a16-static-order": {"gptq": True, "config_groups": one({**INT4, "actorder": "weight"})},
    "ct-w4a16-head": {"ignore": ["re:.*o_proj"], "config_groups": one(INT4)},
    "ct-w4a16-tied": {"tied": True, "config_groups": one(INT4)},
    "ct-w8a16": {"scheme": "W8A16", "sizes": WIDE},
    "ct-w8a16-asym-g32": {"config_groups": one({**INT8, "symmetric": False})},
    "ct-w8a8": {"scheme": "W8A8"},
    "ct-w8a8-static-asym": {"config_groups": one({**INT8, **CHANNEL}, STATIC)},
    "ct-fp8": {"scheme": "FP8"},
    "ct-fp8-dynamic": {"scheme": "FP8_DYNAMIC"},
    "ct-fp8-block": {"scheme": "FP8_BLOCK"},
    "ct-nvfp4": {"scheme": "NVFP4"},
    "ct-nvfp4a16": {"scheme": "NVFP4A16"},
    "ct-mxfp4a16": {"scheme": "MXFP4A16"},
    "ct-mxfp4": {"scheme": "MXFP4"},
    "ct-mxfp8": {"scheme": "MXFP8"},
    "ct-mixed": {"config_groups": mixed},
}


def modelopt(name: str, preset: str, *, sizes=None, cache=False) -> None:
    import copy

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    with tempfile.TemporaryDirectory() as room:
        plain = base(Path(room) / "base", **(sizes or {}))
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        how = copy.deepcopy(getattr(mtq, preset))
        off = {"quantizer_name": "*o_proj*", "enable": False}
        if isinstance(how["quant_cfg"], list):
            how["quant_cfg"].append(off)
        else:
            how["quant_cfg"]["*o_proj*"] = {"enable": False}
        if cache:
            how = (
                mtq.update_quant_cfg_with_kv_cache_quant(how, mtq.FP8_KV_CFG["quant_cfg"])
                if hasattr(mtq, "update_quant_cfg_with_kv_cache_quant")
                else how
            )

        def loop(model):
            for batch in batches():
                model(**batch)

        mtq.quantize(model, how, loop)
        written = Path(room) / "written"
        folded = copy.deepcopy(model)
        export_hf_checkpoint(model, export_dir=written)
        record(name, written, modelopt_weights(written, folded))


def modelopt_weights(written, model) -> dict[str, torch.Tensor]:
    """Dequantize with modelopt's own tensor classes."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    stored = load_file(written / "model.safetensors")
    config = json.loads((written / "hf_quant_config.json").read_text())["quantization"]
    found = {}
    for module in sorted(quantized(written)):
        w, s = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
        algo = config["quant_algo"]
        n = w.shape[0]
        if algo == "NVFP4":
            shape = torch.Size((n, w.shape[1] * 2))
            value = NVFP4QTensor(shape, torch.bfloat16, w).dequantize(
                dtype=torch.float32,
                scale=s,
                double_scale=stored[f"{module}.weight_scale_2"],
                block_sizes={-1: 16},
                fast=False,
            )
        elif algo == "MXFP8":
            value = MXFP8QTensor(w.shape, torch.bfloat16, w).dequantize(dtype=torch.float32, scale=s)
        elif algo.upper() == "MXFP4":  # its class cannot read what its export writes
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
            value = table[torch.stack((w & 15, w >> 4), -1).flatten(1).int()] * torch.exp2(
                s.float() - 127
            ).repeat_interleave(32, 1)
        elif algo == "W4A16_AWQ":
            low, high = (w & 15).to(torch.int8), (w >> 4).to(torch.int8)
            whole = torch.stack((low, high), 1).flatten(0, 1)
            whole = torch.where(whole > 7, whole - 16, whole).float()
            value = whole * s.repeat_interleave(whole.shape[1] // s.shape[1], 1)
            if f"{module}.pre_quant_scale" in stored:
                value = value * stored[f"{module}.pre_quant_scale"].float()
        elif s.dim() == 4:
            grid = s[:, 0, :, 0].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, : w.shape[1]]
            value = w.float() * grid
        else:
            value = FP8QTensor(w.shape, torch.bfloat16, w).dequantize(
                dtype=torch.float32, scale=s[:, None] if s.dim() == 1 else s
            )
        found[f"{module}.weight"] = value
        if algo.upper() in ("NVFP4", "MXFP4", "MXFP8"):
            continue  # fake quantization to these needs a GPU
        layer = model.get_submodule(module)
        faked = layer.weight_quantizer(layer.weight).float()
        if f"{module}.pre_quant_scale" in stored:
            faked = faked * stored[f"{module}.pre_quant_scale"].float()
        pads = faked.shape == value.shape
        print(
            module,
            algo,
            "against its own fake quantization",
            (float((faked - value).norm() / faked.norm()) if pads else faked.shape),
            flush=True,
        )
    return found


MODELOPT = {
    "mo-fp8": {"preset": "FP8_DEFAULT_CFG"},
    "mo-fp8-cache": {"preset": "FP8_DEFAULT_CFG", "cache": True},
    "mo-fp8-block": {"preset": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"},
    "mo-fp8-channel": {"preset": "FP8_PER_CHANNEL_PER_TOKEN_CFG"},
    "mo-nvfp4": {"preset": "NVFP4_DEFAULT_CFG"},
    "mo-mxfp8": {"preset": "MXFP8_DEFAULT_CFG"},
    "mo-mxfp4": {"preset": "MXFP4_DEFAULT_CFG"},
    "mo-int4-awq": {"preset": "INT4_AWQ_CFG", "sizes": WIDE},
}


def bitsandbytes(name: str, **how) -> None:
    import bitsandbytes as bnb
    from transformers import BitsAndBytesConfig

    with tempfile.TemporaryDirectory() as room:
        plain = base(Path(room) / "base")
        config = BitsAndBytesConfig(llm_int8_skip_modules=["lm_head", "o_proj"], **how)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16, quantization_config=config)
        written = Path(room) / "written"
        model.save_pretrained(written)
        model = AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16)
        weights = {}
        for key, module in model.named_modules():
            if isinstance(module, bnb.nn.Linear4bit):
                weights[f"{key}.weight"] = four_bits(bnb, module)
            elif isinstance(module, bnb.nn.Linear8bitLt):
                weights[f"{key}.weight"] = bnb.functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        record(name, written, weights)


def four_bits(bnb, module) -> torch.Tensor:
    """Dequantize with bitsandbytes' plain implementation: 0.50.2's for a CPU is wrong where blocks cross rows."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code

    state = module.weight.quant_state
    absmax = state.absmax
    if state.nested:
        absmax = bnb.functional.dequantize_blockwise(absmax, state.state2) + state.offset
    code = _get_4bit_code(state.quant_type, "cpu")
    return _dequantize_4bit_compute(
        module.weight.data.reshape(-1), absmax, code, state.blocksize, state.shape, torch.float32
    )


BITSANDBYTES = {
    "bnb-nf4": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.bfloat16,
    },
    "bnb-nf4-single": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_compute_dtype": torch.bfloat16},
    "bnb-int8": {"load_in_8bit": True},
}


def fp8(name: str, *, scales: str) -> None:
    """DeepSeek's layout."""
    with tempfile.TemporaryDirectory() as room:
        plain = base(Path(room) / "base")
        stored = load_file(plain / "model.safetensors")
        out = {}
        for key, w in stored.items():
            if not key.endswith("proj.weight") or "o_proj" in key:
                out[key] = w
                continue
            n, k = w.shape
            padded = torch.zeros(-(-n // 128) * 128, -(-k // 128) * 128)
            padded[:n, :k] = w.float()
            blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
            scale = blocks.abs().amax((1, 3)).clamp(min=1e-4) / 448
            if scales == "e8m0":
                scale = torch.exp2(scale.log2().ceil())
            q = (blocks / scale[:, None, :, None]).view(padded.shape)[:n, :k].clamp(-448, 448).to(torch.float8_e4m3fn)
            out[key], out[f"{key}_scale_inv"] = (
                q.contiguous(),
                scale.contiguous() if scales == "f32" else scale.to(torch.float8_e8m0fnu),
            )
        written = Path(room) / "written"
        written.mkdir()
        save_file(out, written / "model.safetensors", metadata={"format": "pt"})
        described = json.loads((plain / "config.json").read_text())
        described["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.o_proj"],
        }
        if scales == "e8m0":
            described["quantization_config"]["scale_fmt"] = "ue8m0"
        (written / "config.json").write_text(json.dumps(described, indent=1))
        # transformers 5.17 divides the matrix evenly by the grid of scales, which is wrong for partial blocks.
        weights = {}
        for module in sorted(quantized(written)):
            q, scale = out[f"{module}.weight"].float(), out[f"{module}.weight_scale_inv"].float()
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    q[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128] *= scale[row, column]
            weights[f"{module}.weight"] = q
        record(name, written, weights)


PLAIN = {"fp8-block": {"scales": "f32"}, "fp8-block-e8m0": {"scales": "e8m0"}}


def gptqmodel(name: str, *, sizes=None, **how) -> None:
    os.cpu_count = lambda: 8  # gptqmodel refuses two cores
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    how = {**how, "dynamic": {r"-:.*o_proj.*": {}}}
    for key, table in (("format", FORMAT), ("quant_method", METHOD)):
        if key in how:
            how[key] = getattr(table, how[key])
    with tempfile.TemporaryDirectory() as room:
        plain = base(Path(room) / "base", **(sizes or {}))
        tokenizer().save_pretrained(plain)
        model = GPTQModel.load(str(plain), QuantizeConfig(**how), device="cpu")
        model.quantize(
            [{"input_ids": row.tolist(), "attention_mask": [1] * 24} for row in tokens()], batch_size=1, tokenizer=None
        )
        written = Path(room) / "written"
        model.save(str(written))
        backend = BACKEND.TORCH_AWQ if "quant_method" in how else BACKEND.TORCH
        loaded = GPTQModel.load(str(written), backend=backend, device="cpu", dtype=torch.float16).model
        weights = {}
        for key, module in loaded.named_modules():
            if hasattr(module, "qweight"):
                weights[f"{key}.weight"] = gptq_weight(module)
        record(name, written, weights)


def gptq_weight(module) -> torch.Tensor:
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight().T.contiguous()
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size).T.contiguous()


GPTQ = {
    "gptq-g32": {"bits": 4, "group_size": 32, "desc_act": False},
    "gptq-g128": {"bits": 4, "group_size": 128, "desc_act": False, "sizes": WIDE},
    "gptq-desc-act": {"bits": 4, "group_size": 32, "desc_act": True},
    "gptq-asym": {"bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    "gptq-int8": {"bits": 8, "group_size": 32, "desc_act": False},
    "gptq-channel": {"bits": 4, "group_size": -1, "desc_act": False, "act_group_aware": False},
    "gptq-v2": {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "format": "GPTQ_V2"},
    "awq-g32": {
        "sizes": {"hidden_size": 192, "intermediate_size": 320},
        "bits": 4,
        "group_size": 32,
        "quant_method": "AWQ",
        "format": "GEMM",
    },
    "awq-g128": {
        "bits": 4,
        "group_size": 128,
        "quant_method": "AWQ",
        "format": "GEMM",
        "sizes": {**WIDE, "num_key_value_heads": 2},
    },
}

WRITERS = {
    "llmcompressor": (llmcompressor, LLMCOMPRESSOR),
    "modelopt": (modelopt, MODELOPT),
    "bitsandbytes": (bitsandbytes, BITSANDBYTES),
    "plain": (fp8, PLAIN),
    "gptqmodel": (gptqmodel, GPTQ),
}

if __name__ == "__main__":
    write, table = WRITERS[sys.argv[1]]
    for name, how in table.items():
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        write(name, **{key: value() if callable(value) else value for key, value in how.items()})
