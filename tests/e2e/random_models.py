"""Checkpoints with random weights and vocabularies: byte-level, SentencePiece, and byte-level of 150,000 tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from tests import tiny
from tests.grammar import vocabularies

if TYPE_CHECKING:
    from pathlib import Path

SPREAD = 3.0  # standard deviation of the logits: biases of requests outweigh it
MARK = "\u2581"  # a space, in SentencePiece


def checkpoint(kind: str, directory: Path) -> Path:
    """Write a checkpoint with a vocabulary of tests/grammar/vocabularies.py."""
    drawn = getattr(vocabularies, kind)(3)
    pieces = dict.fromkeys(piece for at, piece in enumerate(drawn.tokens) if piece and at not in drawn.special)
    sentencepiece = kind == "sentencepiece"
    spelled = [_spelled(piece, sentencepiece=sentencepiece) for piece in pieces]
    special = ["<s>", "<end>", "<turn>", "<think>"]
    ids = {text: number for number, text in enumerate([*special, *dict.fromkeys(spelled)])}
    model: dict[str, Any] = {"type": "BPE", "vocab": ids, "merges": [], "byte_fallback": sentencepiece}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    space, mark = {"String": " "}, {"String": MARK}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": mark, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    prefixed = [{"type": "Prepend", "prepend": MARK}, {"type": "Replace", "pattern": space, "content": MARK}]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[text], "content": text, "special": True, **flags} for text in special],
        "normalizer": {"type": "Sequence", "normalizers": prefixed} if sentencepiece else None,
        "pre_tokenizer": None if sentencepiece else level,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": steps} if sentencepiece else level,
        "model": model,
    }
    tiny.make("llama", directory, vocab_size=len(ids) + 13, bos_token_id=0, eos_token_id=[1, 2])
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= SPREAD / tiny.SPREAD
    save_file(tensors, weights, metadata={"format": "pt"})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<end>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def _spelled(piece: bytes, *, sentencepiece: bool) -> str:
    """Write a token as its kind of tokenizer does."""
    if not sentencepiece:
        return "".join(_LETTERS[byte] for byte in piece)
    return f"<0x{piece[0]:02X}>" if len(piece) == 1 and piece not in b' {"' else piece.decode().replace(" ", MARK)


def _letters() -> list[str]:
    """Return GPT-2's character for each byte: printable bytes are themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


_LETTERS = _letters()
