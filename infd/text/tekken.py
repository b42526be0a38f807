"""Read tekken.json, the tokenizer of Mistral's checkpoints, and convert it to a tokenizer.json.

The file lists the bytes of each token, in the order of ranks. Byte-pair encoding always joins the pair of tokens whose
joined bytes have the lowest rank. So the merges of the tokenizer.json are all splits of each token into two tokens, in
the order of the tokens' ranks. Special tokens have the first ids; the id of any other token is its rank plus the number
of special tokens.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from infd.errors import CheckpointError
from infd.untrusted import read as read_file

if TYPE_CHECKING:
    from pathlib import Path

FILE: Final = "tekken.json"
BOS, EOS = "<s>", "</s>"
_LARGEST_BYTES: Final = 2**26
_LONGEST_TOKEN: Final = 512  # maximum bytes of a token; computing a token's splits takes quadratic time
# The special tokens if the file does not list any.
_SPECIAL: Final = (
    *("<unk>", BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


class _Token(Struct):
    rank: int
    token_bytes: str


class _Special(Struct):
    rank: int
    token_str: str


class _Config(Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str


class Efforts(Struct):
    """The efforts of thoughts with which a model was trained, and the effort for requests that set none."""

    values: list[str]
    default: str | None = None


class Settings(Struct):
    """The model settings in prompts, since version 15. reasoning_effort: None: prompts do not state the effort."""

    reasoning_effort: Efforts | None = None


class Tekken(Struct):
    """The content of a tekken.json."""

    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None
    model_settings_builder: Settings | None = None

    @property
    def version(self) -> str:
        return self.config.version


def read(directory: Path) -> Tekken:
    """Read a checkpoint's tekken.json. Raises CheckpointError."""
    path = directory / FILE
    try:
        return msgspec.json.decode(read_file(path, _LARGEST_BYTES), type=Tekken)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def convert(directory: Path) -> bytes:
    """Return the tokenizer.json of a checkpoint with a tekken.json. Takes seconds. Raises CheckpointError."""
    path, found = directory / FILE, read(directory)
    count, special = found.config.default_num_special_tokens, list(_SPECIAL)
    if found.special_tokens is not None:
        special = [token.token_str for token in sorted(found.special_tokens, key=lambda token: token.rank)]
    tokens = found.vocab[: found.config.default_vocab_size - count]
    if not len(tokens) >= 256 or not len(special) <= count <= 2**16:
        raise CheckpointError(f"{path}: {len(tokens)} tokens and {len(special)} of {count} special tokens")
    special += [f"<SPECIAL_{number}>" for number in range(len(special), count)]
    try:
        ranks = {base64.b64decode(token.token_bytes): token.rank for token in tokens}
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if sorted(ranks.values()) != list(range(len(tokens))) or max(map(len, ranks)) > _LONGEST_TOKEN:
        raise CheckpointError(f"{path}: the ranks of its tokens are not 0, 1, ..., or a token is too long")
    letters = _letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (written[token[:at]], written[token[at:]])
        for token in ranks
        for at in range(1, len(token))
        if token[:at] in ranks and token[at:] in ranks
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": found.config.pattern}, "behavior": "Isolated", "invert": False}
    bos: dict[str, Any] = {"id": BOS, "ids": [special.index(BOS)], "tokens": [BOS]}
    single = [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, "special": True, **flags} for number, text in enumerate(special)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: bos},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text: number for number, text in enumerate(special)}
            | {written[token]: rank + count for token, rank in ranks.items()},
            "merges": merges,
        },
    }
    return msgspec.json.encode(content)


def _letters() -> list[str]:
    """Return, for each byte, the character that represents it in a byte-level tokenizer.json."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
