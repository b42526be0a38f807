"""Prompts with a gap have the tokens of the model's family."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from infd.text.infill import FAMILIES, File, Gap, Infill
from infd.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

# Each family's own prompt, as its model card writes it, for the code P, a gap, and the code S.
CARDS = {
    "Qwen2.5-Coder, Qwen3-Coder": "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
    "CodeGemma": "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
    "Granite 4": "<|fim_prefix|>{P}<|fim_suffix|>{S}<|fim_middle|>",
    "StarCoder2": "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>",
    "StarCoder, Granite Code": "<fim_prefix>{P}<fim_suffix>{S}<fim_middle>",
    "SantaCoder": "<fim-prefix>{P}<fim-suffix>{S}<fim-middle>",
    "DeepSeek-Coder": "<｜fim▁begin｜>{P}<｜fim▁hole｜>{S}<｜fim▁end｜>",
    "CodeLlama": "▁<PRE>{P}▁<SUF>{S}▁<MID>",
    "GLM-4": "<|code_prefix|>{P}<|code_suffix|>{S}<|code_middle|>",
    "Seed-Coder": "<[fim-suffix]>{S}<[fim-prefix]>{P}<[fim-middle]>",
    "Codestral": "[SUFFIX]{S}[PREFIX]{P}",
}
CODE, REST = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


def marks(name: str) -> list[str]:
    family = FAMILIES[name]
    named = (family.prefix, family.suffix, family.middle, family.repository, family.file, *family.ends)
    return [token for token in dict.fromkeys(named) if token is not None]


def load(directory: Path, special: list[str], bos: str | None = None) -> Tokenizer:
    """Return a byte-level tokenizer with these special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*special, *([bos] if bos else [])])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    backend.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": bos} if bos else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(directory)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_is_as_the_familys_model_card_writes_it(tmp_path: Path, name: str):
    tokenizer = load(tmp_path, marks(name))
    infill = Infill.choose(tokenizer)
    assert infill is not None

    tokens = infill.prompt(Gap(CODE, REST))

    card = CARDS[name].format(P=CODE, S=REST)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == card
    assert tokens == tokenizer.encode(card)
    assert infill.end_ids == {tokenizer.id_of(token) for token in FAMILIES[name].ends}
    assert infill.prompt(Gap(tokenizer.encode(CODE), REST)) == tokens


def test_the_gap_begins_with_a_given_text_and_a_sequence_with_its_token(tmp_path: Path):
    tokenizer = load(tmp_path, marks("StarCoder2"), bos="<s>")
    infill = Infill.choose(tokenizer)
    assert infill is not None

    text = tokenizer.decode(infill.prompt(Gap("a", "b", begun="c")), skip_special_tokens=False)

    assert text == "<s><fim_prefix>a<fim_suffix>b<fim_middle>c"


def test_other_files_come_first(tmp_path: Path):
    files = (File("a.py", "A = 1\n"), File("b.py", "B = 2\n"))
    written = {}
    for name in ("Qwen2.5-Coder, Qwen3-Coder", "CodeGemma", "DeepSeek-Coder"):
        tokenizer = load(tmp_path, marks(name))
        infill = Infill.choose(tokenizer)
        assert infill is not None
        text = tokenizer.decode(infill.prompt(Gap("a", "b", files=files)), skip_special_tokens=False)
        written[name] = text.removesuffix(CARDS[name].format(P="a", S="b"))

    # The first two as Qwen2.5-Coder's and CodeGemma's cards write files; the last as llama.cpp does for such models.
    sep, other = "<|file_sep|>", "<|file_separator|>"
    assert [*written.values()] == [
        f"<|repo_name|>repository\n{sep}a.py\nA = 1\n{sep}b.py\nB = 2\n{sep}filename\n",
        f"{other}a.py\nA = 1\n{other}b.py\nB = 2\n{other}filename\n",
        "\n\n--- snippet ---\n\nA = 1\n\n\n--- snippet ---\n\nB = 2\n",
    ]


def test_a_vocabulary_without_the_tokens_fills_no_gap(tmp_path: Path):
    assert Infill.choose(load(tmp_path, ["<|fim_prefix|>", "<fim_suffix>"])) is None


def test_a_sentencepiece_tokenizer_puts_no_space_before_a_part(tmp_path: Path):
    space = "▁"
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<0x0A>", space, "a", "b", space + "a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [(space, "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend(space), tokenizers.normalizers.Replace(" ", space)]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(marks("CodeLlama"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    infill = Infill.choose(tokenizer)
    assert infill is not None

    prompt = [tokenizer.token(token) for token in infill.prompt(Gap("ab a", "\nb"))]

    assert prompt == ["▁<PRE>", "a", "b", "▁a", "▁<SUF>", "<0x0A>", "b", "▁<MID>"]
