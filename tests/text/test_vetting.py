"""Ordinary checkpoints run in the daemon's process; templates and tokenizers of unbounded cost do not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import tokenizers

from infd import embedded
from infd.text import vetting
from infd.text.checkpoint import Additions
from infd.text.sandbox import Sandbox
from infd.text.vetting.regexes import is_linear
from infd.text.vetting.templates import MOST_NODES
from tests.text.templates import TEMPLATES
from tests.text.vocabularies import KINDS, byte_level

TEMPLATES_OF_OURS = {"embedded": (embedded.path() / "chat_template.jinja").read_text()} | TEMPLATES


def template_objection(source: str) -> str | None:
    return vetting.templates.objection(Sandbox().parse(source))


@pytest.mark.parametrize("source", TEMPLATES_OF_OURS.values(), ids=TEMPLATES_OF_OURS)
def test_the_templates_of_all_families_run_in_process(source: str):
    assert template_objection(source) is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ x | wordwrap(1) }}", "line 1: the filter wordwrap"),
        ("\n{{ x | sum(start=[]) }}", "line 2: the filter sum"),
        ("{{ x | map('sum', start=[]) }}", "the filter map"),
        ("{{ x | map(name) }}", "the filter map"),
        ("{{ x | map('urlize') }}", "the filter map"),
        ("{{ x | select(name) }}", "the filter select"),
        ("{{ x | select('divisibleby', 2) }}", "the filter select"),
        ("{{ x | selectattr(name) }}", "the filter selectattr"),
        ("{{ x | sort(**y) }}", "the filter sort"),
        ("{{ x | join(', ', y) }}", "the filter join"),
        ("{{ x | round(99) }}", "the filter round"),
        ("{{ x | batch(9999) }}", "the filter batch"),
        ("{{ x | center(y) }}", "the filter center"),
        ("{{ x | tojson(ensure_ascii=true) }}", "the filter tojson"),
        ("{{ x | attr(y) }}", "the filter attr"),
        ("{{ x is lower }}", "the test lower"),
        ("{{ a < b < c }}", "a chain of comparisons"),
        ("{{ {a: 1} }}", "a mapping with computed keys"),
        ("{{ 0x" + "f" * 99 + " // 3 }}", "too large a number"),
        ("{% block a %}{% endblock %}", "a node of type Block"),
        ("{% include 'a' %}", "a node of type Include"),
        ("{{ a }}" * MOST_NODES, f"more than {MOST_NODES} nodes"),
    ],
)
def test_a_template_that_fuel_does_not_cover_is_not_vetted(source: str, reason: str):
    assert reason in (template_objection(source) or "")


WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{WORDS}",
    "Qwen2": rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{WORDS}",
    "Qwen3.5": rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "Tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "DeepSeek's numbers": r"\p{N}{1,3}",
    "DeepSeek's characters": "[一-龥぀-ゟ゠-ヿ]+",
    "DeepSeek's words": r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "BLOOM": " ?[^(\\s|[.,!?…。，、।۔،])]+",
    "Falcon": "[0-9][0-9][0-9]",
    "T5": " {2,}",
}


@pytest.mark.parametrize("pattern", KNOWN.values(), ids=KNOWN)
def test_the_expressions_of_known_tokenizers_are_fast(pattern: str):
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a+)+$", r"(a|a)*b", r"a+b", r"a+?b", r"a*a*b", r"(?:a{1,64}){1,64}", r".*x", r"a++b", r"a{0,}b", r"a{99}"),
        *(r"\s+(?!\S)|x", r"\s*[\r\n]+|\s|\s+", r"\s+(?!\s)|\s+", r"(?=a+b)c", r"(?<!a)b", r"a+\b", r"(a)\1", r"(?:a"),
        *(r"[a", "", "x|", r"\p{L}+\p{N}", r"a+(?:b)", r"[a&&[^b]]+c", f"{KNOWN['o200k']}b", "(?:a+|b)", r"a+^"),
        KNOWN["o200k"].replace("|", "x|", 1),
        *("a*", "a|b?", "(?:a)?", r"\b", "^"),  # which may match nothing
    ],
)
def test_an_expression_that_may_backtrack_is_not_classified_as_fast(pattern: str):
    assert not is_linear(pattern)


def described(**parts: Any) -> bytes:
    """Return a small tokenizer.json with some parts replaced."""
    return json.dumps(json.loads(byte_level().to_str()) | parts).encode()


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replaced(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def model(**parameters: Any) -> dict[str, Any]:
    return {"model": json.loads(byte_level().to_str())["model"] | parameters}


def charsmap(*forms: bytes) -> str:
    return base64.b64encode((1024).to_bytes(4, "little") + bytes(1024) + b"\0".join((*forms, b""))).decode()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_is_loaded_as_it_was_read(kind: str):
    content = KINDS[kind]().to_str().encode()

    written, objection = vetting.tokenizers.read(content)

    assert objection is None
    assert tokenizers.Tokenizer.from_buffer(written).to_str() == tokenizers.Tokenizer.from_buffer(content).to_str()


@pytest.mark.parametrize("directory", [embedded.path(), embedded.path().parent / "draft"], ids=lambda path: path.name)
def test_the_embedded_tokenizers_run_in_process(directory: Any):
    written, objection = vetting.tokenizers.read((directory / "tokenizer.json").read_bytes())

    assert objection is None
    assert tokenizers.Tokenizer.from_buffer(written).to_str() == (
        tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).to_str()
    )


def test_of_a_key_that_occurs_twice_one_is_read_and_the_same_is_loaded():
    twice = described().replace(b'"normalizer": null', b'"normalizer": {"type": "NFC"}, "normalizer": null')
    assert twice != described()

    written, objection = vetting.tokenizers.read(twice)

    assert objection is None
    assert tokenizers.Tokenizer.from_buffer(written).normalizer is None


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"pre_tokenizer": split("(a+)+$")}, "pre_tokenizer: Split: a regular expression"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split("a+b")]}}, "a regular expression"),
        ({"pre_tokenizer": {"type": "Novel"}}, "pre_tokenizer: the type Novel"),
        ({"pre_tokenizer": {"type": "Digits", "surprise": 1}}, "pre_tokenizer: Digits: surprise"),
        ({"normalizer": replaced("a", "a" * 99)}, "normalizer: Replace: content"),
        ({"normalizer": replaced("", "a")}, "normalizer: Replace: pattern"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replaced("a", "aaa")] * 9}},
            "normalizer: steps that multiply",
        ),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 99}}, "normalizer: Prepend: prepend"),
        ({"normalizer": {"type": "Prepend", "prepend": ""}}, "normalizer: Prepend: prepend"),  # the library may panic
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}}, "normalizer: not a list"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(b"a" * 99)}}, "precompiled_charsmap"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "precompiled_charsmap"),
        ({"decoder": {**replaced("a", "b"), "pattern": {"Regex": "a"}}}, "decoder: Replace: a regular expression"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 10**9, "stop": 0}}, "decoder: Strip: start"),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}] * 99}},
            "post_processor: TemplateProcessing: single",
        ),
        ({"added_tokens": [{"id": 1, "content": "a" * 2000}]}, "too many or too long added tokens"),
        ({"added_tokens": [{"id": i, "content": f"{i:0999}"} for i in range(99)]}, "too many or too long added tokens"),
        ({"added_tokens": [{"id": 1, "content": "a", "surprise": 1}]}, "added_tokens"),
        (model(end_of_word_suffix="a" * 99), "model: too long an affix"),
        (model(dropout=0.5), "model: dropout"),
        (model(continuing_subword_prefix="a"), "model: continuing_subword_prefix"),  # may abort the process at load
        (model(type="Novel"), "model: the type Novel"),
        (model(type="WordPiece", unk_token="a", max_input_chars_per_word=10**9), "model: max_input_chars_per_word"),
        (model(type="Unigram", vocab=[["a" * 999, 0.0]], unk_id=0), "model: too many or too long pieces"),
        (model(type="Unigram", vocab=[["a", 0.0]]), "model: unk_id"),
        (model(unk_token="nowhere"), "model: unk_token"),
        ({"model": {"type": "BPE"}}, "infd does not read it"),
    ],
)
def test_a_tokenizer_of_unknown_cost_is_not_vetted(parts: dict[str, Any], reason: str):
    content = described(**parts)

    unchanged, objection = vetting.tokenizers.read(content)

    assert reason in (objection or "")
    assert unchanged == content


def test_a_table_of_short_normalized_forms_is_none_to_object_to():
    content = described(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap(b"a", b"fi")})

    assert vetting.tokenizers.read(content)[1] is None


def test_tokens_of_other_files_are_vetted_too():
    ordinary = Additions(({"content": "<a>", "special": True},), ("<b>",), False)
    long = Additions((), ("a" * 2000,), False)
    strange = Additions(({"content": "<a>", "__reduce__": 1},), (), False)

    assert vetting.tokenizers.objection_to_added(ordinary) is None
    assert vetting.tokenizers.objection_to_added(long)
    assert vetting.tokenizers.objection_to_added(strange)
