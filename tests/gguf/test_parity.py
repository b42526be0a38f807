"""Models from GGUF files: logits equal those of the checkpoints from which the files were written."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from infd.errors import CheckpointError
from infd.gguf.config import ARCHITECTURES
from infd.kernels.select import CANDIDATES, EXACT, select
from infd.models.config import stored_dtype
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
UNSTATED = {"gemma3-seeing", "llama-rope-dynamic", "mistral-window", "qwen2-windows", "qwen3-windows"}
READ = {each.type for each in ARCHITECTURES.values()}
STATED = sorted(variant for variant in VARIANTS if variant not in UNSTATED and VARIANTS[variant][0] in READ)


def made(variant: str, directory: Path, **overrides: Any) -> Path:
    return make(variant, directory, **{**(GEMMA if variant.startswith("gemma") else {}), **overrides})


def logits(path: Path, tokens: list[int]) -> Tensor:
    ops = select(CPU, torch.float32, {**CANDIDATES, **EXACT})
    driver = Driver(load_model(path, ops=ops), ops=ops, page_tokens=4, seed=3)
    return driver.step((driver.start(tokens), len(tokens)))[0]


@pytest.mark.parametrize("variant", STATED)
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


def test_a_mixture_of_experts_and_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = made("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    mixture = write(checkpoint, tmp_path / "mixture.gguf", keys={"llama.expert_count": 8})
    with pytest.raises(CheckpointError, match=r"mixture\.gguf: llama\.expert_count: expected 0"):
        read_config(mixture)
    other = tmp_path / "other.gguf"
    text_of_five = b"\5" + bytes(7)
    other.write_bytes(mixture.read_bytes().replace(text_of_five + b"llama", text_of_five + b"mamba", 1))
    with pytest.raises(CheckpointError, match=r"general\.architecture: expected one of gemma2, .*, found 'mamba'"):
        read_config(other)


def test_a_tensor_that_the_model_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = made("llama", tmp_path / "checkpoint", num_hidden_layers=1)
    path = write(checkpoint, tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_z.weight"))
    with pytest.raises(CheckpointError, match=r"k_proj\.weight: missing(.|\n)*blk\.0\.attn_z\.weight: left over"):
        load_model(path)
