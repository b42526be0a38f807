"""Make the embedded checkpoint: `python -m infd.embedded.make [DIR]`.

The same bytes come out on every machine and with every torch, because neither
is asked: the weights are drawn from Python's own generator, whose sequence is
guaranteed.
"""

from __future__ import annotations

import json
import math
import random
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from infd import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED: Final = 20_260_101
SOURCE: Final = Path(__file__).parent / "source"

VOCAB: Final = 512
CONTEXT: Final = 2048
# Control tokens are left out of the text that users see; the others belong to it, for parsers to find.
CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": CONTEXT,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def make(directory: Path) -> None:
    """Write the checkpoint's files into `directory`, over those that are there."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train_tokenizer((SOURCE / "corpus.txt").read_text(encoding="utf-8"))
    assert tokenizer.get_vocab_size() == VOCAB
    control = {token: tokenizer.token_to_id(token) for token in CONTROL}
    pad, end = control["<|endoftext|>"], control["<|im_end|>"]

    (directory / "model.safetensors").write_bytes(_safetensors())
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_bytes((SOURCE / "chat_template.jinja").read_bytes())
    _write(directory / "config.json", CONFIG | {"eos_token_id": end, "pad_token_id": pad})
    _write(
        directory / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": [end, pad],
            "pad_token_id": pad,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
    )
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )


def _train_tokenizer(text: str) -> tokenizers.Tokenizer:
    """Byte-level BPE: the 256 bytes, so that any text can be written, then what is frequent in `text`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = len(CONTROL) + len(MARKUP)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - added, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    return tokenizer


def _safetensors() -> bytes:
    """Draw the weights, and lay them out as safetensors: a length, a JSON table of contents, the values.

    Norms are one, the rest uniform with variance 1 / inputs.
    """
    noise = random.Random(SEED)  # noqa: S311 (weights are no secret)
    contents: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    values = bytearray()
    for name, shape in _shapes():
        begin = len(values)
        spread = (3 / shape[-1]) ** 0.5
        for _ in range(math.prod(shape)):
            values += _bfloat16(1.0 if len(shape) == 1 else spread * (2 * noise.random() - 1))
        contents[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, len(values)]}
    table = json.dumps(contents).encode()
    table += b" " * (-len(table) % 8)  # values begin at a multiple of 8
    return struct.pack("<Q", len(table)) + table + values


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (VOCAB, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)


def _bfloat16(value: float) -> bytes:
    """The upper half of a float32."""
    return struct.pack("<f", value)[2:]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else embedded.path())
