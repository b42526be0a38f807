"""Models from GGUF files: logits equal those of the checkpoints from which the files were written."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from infd.errors import CheckpointError
from infd.gguf.config import ARCHITECTURES, MIXTURES, MOST_LAYERS
from infd.kernels.select import CANDIDATES, EXACT, select
from infd.models.config import stored_dtype
from infd.models.parameter import MatrixStack
from infd.weights.checkpoint import Checkpoint as Weights
from infd.weights.checkpoint import read_config
from infd.weights.encodings.rows import rows_of
from infd.weights.stored import EncodedTensor
from tests.gguf.writing import TYPES, write
from tests.kernels.paging import CPU
from tests.models.driving import Driver, load_model
from tests.models.test_parity import CLOSE, off, text
from tests.tiny import VARIANTS, VOCAB, make, oracle

if TYPE_CHECKING:
    from pathlib import Path

    import gguf
    from torch import Tensor

GEMMA = {"query_pre_attn_scalar": 16}  # the head's size, which llama.cpp assumes for all but the 27B models
# Settings that GGUF files do not state: windows of Mistral and Qwen, and dynamic rope.
UNSTATED = {"gemma3-seeing", "llama-rope-dynamic", "mistral-window", "mixtral", "qwen2-windows", "qwen3-windows"}
UNSTATED |= {"olmoe-norm", "qwen2-moe-norm", "qwen3-moe"}  # llama.cpp normalizes weights of qwen3moe alone
READ = {each.type for each in (*ARCHITECTURES.values(), *MIXTURES.values())}
ASSUMED = {
    **dict.fromkeys(("gemma2", "gemma2-no-caps", "gemma3"), GEMMA),
    "gpt-oss": {"swiglu_limit": 7.0},
    "qwen2-moe": {"mlp_only_layers": []},
}
STATED = sorted(variant for variant in VARIANTS if variant not in UNSTATED and VARIANTS[variant][0] in READ)


def made(variant: str, directory: Path, **overrides: Any) -> Path:
    return make(variant, directory, **{**ASSUMED.get(variant, {}), **overrides})


def logits(path: Path, tokens: list[int]) -> Tensor:
    ops = select(CPU, torch.float32, {**CANDIDATES, **EXACT})
    driver = Driver(load_model(path, ops=ops), ops=ops, page_tokens=4, seed=3)
    return driver.step((driver.start(tokens), len(tokens)))[0]


@pytest.mark.parametrize("variant", [*STATED, "granite-moe-shared"])
def test_the_logits_are_the_checkpoints(variant: str, tmp_path: Path) -> None:
    checkpoint = made(variant, tmp_path / "checkpoint")
    path = write(checkpoint, tmp_path / "model.gguf")
    with torch.inference_mode():
        theirs = oracle(checkpoint)(torch.tensor([text(1)])).logits[0]

    assert off(logits(path, text(1)), theirs) < CLOSE


def test_every_architecture_of_the_table_is_compared() -> None:
    assert {VARIANTS[variant][0] for variant in STATED} == READ


# Transformers takes the vocabulary's size from the tokens, and assumes the size of Qwen3's heads.
READ_BY_BOTH = (
    ("llama", TYPES.Q8_0),
    ("llama-one-head-each", TYPES.Q4_K),
    ("qwen2", TYPES.Q5_1),
    ("qwen3", TYPES.Q5_0),
    ("qwen3-tied", TYPES.IQ4_XS),
    ("gemma2", TYPES.Q6_K),
    ("phi3-window", TYPES.Q4_1),
)


def tokens(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_pad_token_id(0)


@pytest.mark.parametrize(("variant", "kind"), READ_BY_BOTH)
def test_quantized_weights_and_settings_are_those_that_transformers_reads(
    variant: str, kind: TYPES, tmp_path: Path
) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "rope_parameters": None}
    heads = {"head_dim": 128 if variant.startswith("qwen3") else 64}
    checkpoint = made(variant, tmp_path / "checkpoint", **{**wide, **heads})
    path = write(checkpoint, tmp_path / "model.gguf", kind, vocabulary=tokens)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", attn_implementation="eager", dtype=torch.float32
    ).eval()

    settings = read_config(path)
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        assert settings[key] == getattr(theirs.config, key), key
    for key in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert settings[key] == getattr(theirs.config, key), key
    weights = theirs.state_dict()
    with Weights(path) as file:
        encoded = {name: each for name, each in file.tensors.items() if isinstance(each, EncodedTensor)}
        assert kind.name in {each.encoding.label for each in encoded.values()}
        for name, each in encoded.items():
            rows = rows_of(each.encoding)
            count = prod(each.shape[:-1])
            assert rows(0, count).view(each.shape).equal(weights[name]), name
    if variant not in ("gemma2", "phi3-window"):  # transformers reads no windows
        with torch.inference_mode():
            expected = theirs(torch.tensor([text(1)])).logits[0]
        assert off(logits(path, text(1)), expected) < CLOSE


def test_the_dtype_follows_the_matrices(tmp_path: Path) -> None:
    checkpoint = made("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    for kind, dtype in ((TYPES.F32, "float32"), (TYPES.F16, "float16"), (TYPES.BF16, "bfloat16")):
        path = write(checkpoint, tmp_path / f"{kind.name}.gguf", kind)
        assert stored_dtype(read_config(path)) == dtype


def test_other_mixtures_of_experts_and_architectures_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = made("qwen3", tmp_path / "checkpoint", num_hidden_layers=1)
    mixture = write(checkpoint, tmp_path / "mixture.gguf", keys={"qwen3.expert_count": 8})
    with pytest.raises(CheckpointError, match=r"mixture\.gguf: qwen3\.expert_count: expected 0: with .*qwen3moe"):
        read_config(mixture)
    other = tmp_path / "other.gguf"
    text_of_five = b"\5" + bytes(7)
    other.write_bytes(mixture.read_bytes().replace(text_of_five + b"qwen3", text_of_five + b"mamba", 1))
    with pytest.raises(CheckpointError, match=r"general\.architecture: expected one of gemma2, .*, found 'mamba'"):
        read_config(other)


def test_rotation_of_a_part_of_each_head_is_refused_where_infd_rotates_the_whole(tmp_path: Path) -> None:
    checkpoint = made("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    path = write(checkpoint, tmp_path / "model.gguf", keys={"llama.rope.dimension_count": 4})
    with pytest.raises(CheckpointError, match=r"llama\.rope\.dimension_count: expected 16, .*found 4"):
        read_config(path)


def test_a_file_of_too_many_layers_is_refused(tmp_path: Path) -> None:
    checkpoint = made("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    path = write(checkpoint, tmp_path / "model.gguf", keys={"llama.block_count": MOST_LAYERS + 1})
    with pytest.raises(CheckpointError, match=rf"llama\.block_count: expected at most {MOST_LAYERS}, found"):
        read_config(path)


def test_a_mixture_whose_file_lacks_experts_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = made("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    keys: dict[str, int | float | str] = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    with pytest.raises(CheckpointError, match=r"the file lacks blk\.0\.ffn_down_exps\.weight"):
        read_config(write(checkpoint, tmp_path / "mixture.gguf", keys=keys))


@pytest.mark.parametrize(
    ("variant", "kind"), [("qwen3-moe-norm", TYPES.Q8_0), ("mixtral-one", TYPES.Q4_K), ("gpt-oss", TYPES.MXFP4)]
)
def test_quantized_experts_are_kept_and_equal_their_decoded_numbers(variant: str, kind: TYPES, tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    checkpoint = made(variant, tmp_path / "checkpoint", **wide)
    path = write(checkpoint, tmp_path / "model.gguf", kind)
    with Weights(path) as file:
        found = {name: each for name, each in file.tensors.items() if ".experts." in name and "bias" not in name}
        assert {each.encoding.label for each in found.values() if isinstance(each, EncodedTensor)} == {kind.name}
        assert {len(each.shape) for each in found.values()} == {3}
    ops = select(CPU, torch.float32, CANDIDATES)
    kept = load_model(path, ops=ops)
    assert all(stack.kept for stack in kept.parameters if isinstance(stack, MatrixStack))
    decoded = select(CPU, torch.float32, {**CANDIDATES, **EXACT}).replace(packed=Unpacked())
    drivers = Driver(kept, ops=ops), Driver(load_model(path, ops=decoded), ops=decoded)
    ours, theirs = (each.step((each.start(text(1)), len(text(1))))[0] for each in drivers)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()  # products quantize activations


class Unpacked:
    """The family packed without forms, so that matrices are decoded."""

    def form(self, outputs: int, inputs: int, dtype: torch.dtype, groups: object) -> str:
        return "decoded in this test"


def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = made("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    path = write(checkpoint, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_z.weight"))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight: missing(.|\n)*blk\.0\.attn_z\.weight: left over"):
        load_model(path)
