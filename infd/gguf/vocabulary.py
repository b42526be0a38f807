"""Make tokenizer.json from the vocabulary in a GGUF file's metadata.

Two kinds of vocabularies are read: byte-level BPE with merges ("gpt2"), and SentencePiece's BPE ("llama"), whose merges
follow from the scores of its pieces, or their ids (Gemma), if the file contains no merges. The file names the rule that
splits a text before byte-level BPE; RULES lists the rules.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.gguf.metadata import Metadata

MODEL: Final = "tokenizer.ggml.model"
TOKENS: Final = "tokenizer.ggml.tokens"
LONGEST_PIECE: Final = 2**10  # maximum characters of a piece that is split into pairs, in quadratic time
MOST_MERGES: Final = 2**22  # bounds memory; Gemma's 262,144 tokens have 580,000 merges, hostile ones thousands for each
_PRE: Final = "tokenizer.ggml.pre"
# Values of tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 2, 3, 4, 5
_SPACE: Final = "▁"  # SentencePiece's mark of a space

_CONTRACTIONS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{_CONTRACTIONS}|{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_ENDS}"


def _cased_words(digits: str, tail: str) -> str:
    """Return a regular expression that also splits words before capital letters."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{_UPPER}*{_LOWER}+{tail}|{before}{_UPPER}+{_LOWER}*{tail}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_ENDS}"


class Rule(Struct, frozen=True):
    """How a byte-level vocabulary splits a text.

    pattern  regular expression of the pieces; None: GPT-2's
    digits   whether each digit is a piece of its own; only with GPT-2's expression
    nfc      whether the text is normalized to NFC first
    whole    whether a piece that is a token becomes this token without merges
    bos      whether a text begins with the BOS token, if the file lacks tokenizer.ggml.add_bos_token
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole: bool = False
    bos: bool = False


_GPT2: Final = Rule()
_DIGITS: Final = Rule(digits=True)
_LLAMA3: Final = Rule(_words(r"\p{N}{1,3}"), whole=True, bos=True)
_QWEN2: Final = Rule(_words(r"\p{N}"), nfc=True)
_GPT4O: Final = Rule(_cased_words(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"))
# By tokenizer.ggml.pre
RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **dict.fromkeys(("default", "gpt-2", "mpt", "olmo", "jais", "trillion", "phi-2", "jina-en", "jina-es"), _GPT2),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
        **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"), _LLAMA3),
        **dict.fromkeys(("midm-2.0", "lfm2"), _LLAMA3),
        **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Rule(_words(r"\p{N}{1,3}"))),
        **dict.fromkeys(("qwen2", "megrez"), _QWEN2),
        "deepseek-r1-qwen": Rule(_words(r"\p{N}")),
        "tekken": Rule(_cased_words(r"\p{N}", ""), whole=True),
        **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    }
)


def tokenizer_json(metadata: Metadata) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises CheckpointError, which names the file and the key."""
    tokens = metadata.texts(TOKENS)
    types = _types(metadata, len(tokens))
    kind = metadata.text(MODEL)
    if kind not in ("gpt2", "llama"):
        raise metadata.error(MODEL, "'gpt2' or 'llama'", kind)
    parts = _byte_level(metadata, tokens, types) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    # Byte-level vocabularies have no normalizer that changes special tokens; the library adds tokens in order of id.
    added = [_added(number, tokens[number], types[number]) for number in _added_ids(types)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts}


def token(metadata: Metadata, tokens: Sequence[str], role: str) -> str | None:
    """Return the token with a role, such as "bos"; None if the file names none. Raises CheckpointError."""
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in metadata:
        return None
    number = metadata.integer(key)
    if number >= len(tokens):
        raise metadata.error(key, f"an id below {len(tokens)}", number)
    return tokens[number]


def control_ids(metadata: Metadata, tokens: Sequence[str], texts: Sequence[str]) -> list[int]:
    """Return the ids of the control tokens that are among `texts`. Raises CheckpointError."""
    types = _types(metadata, len(tokens))
    return [number for number, text in enumerate(tokens) if types[number] == CONTROL and text in texts]


def _types(metadata: Metadata, count: int) -> Sequence[int]:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return [1] * count
    types = metadata.numbers(key)
    if len(types) != count:
        raise metadata.error(key, f"{count} numbers, one for each token", types)
    return types


def _added_ids(types: Sequence[int]) -> list[int]:
    return [number for number, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)]


def _added(number: int, content: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, **flags, "special": kind == CONTROL}


def _vocabulary(metadata: Metadata, tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {text: number for number, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(text for number, text in enumerate(tokens) if vocabulary[text] != number)
        raise CheckpointError(f"{metadata.path}: {TOKENS}: {twice!r} occurs twice")
    return vocabulary


def _merges(metadata: Metadata, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    pairs = []
    for line in metadata.texts(key):
        left, _, right = line.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise metadata.error(key, "pairs of tokens that make a token", line)
        pairs.append((left, right))
    return pairs


def _byte_level(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    name = metadata.text(_PRE, "default")
    if (rule := RULES.get(name)) is None:
        raise metadata.error(_PRE, f"one of {', '.join(RULES)}", name)
    vocabulary = _vocabulary(metadata, tokens)
    merges = _merges(metadata, vocabulary)
    # Converters name an id without a token [PAD<id>].
    for number, text in enumerate(tokens):
        if types[number] == UNUSED and text == f"[PAD{number}]":
            del vocabulary[text]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = [{**byte_level, "use_regex": rule.pattern is None}]
    if rule.pattern is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": rule.pattern}, "behavior": "Isolated", "invert": False})
    if rule.digits:
        steps.insert(0, {"type": "Digits", "individual_digits": True})
    return {
        "normalizer": {"type": "NFC"} if rule.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _around(metadata, tokens, rule.bos) or {**byte_level, "use_regex": True},
        "decoder": {**byte_level, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": rule.whole},
    }


def _sentencepiece(metadata: Metadata, tokens: list[str], types: Sequence[int]) -> dict[str, Any]:
    gemma = metadata.text("general.architecture").startswith("gemma")
    if gemma:
        # Files store Gemma's tokens of spaces as spaces; the vocabulary spells them with _SPACE.
        tokens[:] = [_SPACE * len(text) if " " in text and not text.strip(" ") else text for text in tokens]
    vocabulary = _vocabulary(metadata, tokens)
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata, vocabulary)
    elif gemma:  # its merges are in order of id; its scores are not
        merges = _implied_merges(metadata, tokens, vocabulary, range(0, -len(tokens), -1))
    else:
        scores = metadata.numbers("tokenizer.ggml.scores")
        if len(scores) != len(tokens):
            raise metadata.error("tokenizer.ggml.scores", f"{len(tokens)} numbers, one for each token", scores)
        merges = _implied_merges(metadata, tokens, vocabulary, scores)
    prefix = metadata.boolean("tokenizer.ggml.add_space_prefix", not gemma)
    to_marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, to_marks]},
        "pre_tokenizer": None,
        "post_processor": _around(metadata, tokens, default=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": next((text for text, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None),
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _implied_merges(
    metadata: Metadata, tokens: Sequence[str], vocabulary: Mapping[str, int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """Return the merges of SentencePiece's BPE: all pairs of pieces that make a piece, by its score, highest first.

    Raises CheckpointError for more than MOST_MERGES.
    """
    found = []
    for number, text in enumerate(tokens):
        if len(text) > LONGEST_PIECE:
            continue
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], number, vocabulary[left], vocabulary[right]))
        if len(found) > MOST_MERGES:
            raise metadata.error(TOKENS, f"tokens of at most {MOST_MERGES:,} pairs of tokens", tokens)
    return [(tokens[left], tokens[right]) for *_, left, right in sorted(found)]


def _around(metadata: Metadata, tokens: Sequence[str], default: bool) -> dict[str, Any] | None:
    """Return the post-processor that adds BOS and EOS tokens, or None if it adds none."""
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [{"Sequence": {"id": "B", "type_id": 1}}]
    special = {}
    for role, adds in (("bos", default), ("eos", False)):
        text = token(metadata, tokens, role)
        if text is None or not metadata.boolean(f"tokenizer.ggml.add_{role}_token", adds):
            continue
        number = metadata.integer(f"tokenizer.ggml.{role}_token_id")
        special[text] = {"id": text, "ids": [number], "tokens": [text]}
        place = 0 if role == "bos" else len(single)
        single.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
        pair.insert(0 if role == "bos" else len(pair), {"SpecialToken": {"id": text, "type_id": 1}})
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *pair], "special_tokens": special}
