"""Text of a checkpoint that runs in the worker: the same prompts and ids as in process, and every limit holds."""

from __future__ import annotations

import json
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

import pytest

from infd.apart.client import Worker
from infd.errors import CheckpointError, InvalidRequest, TextFailed, TooCostly
from infd.text import apart
from infd.text.chat import ChatTemplate
from infd.text.fuel import Limits
from infd.text.syntax import Syntax
from infd.text.tokenizer import Tokenizer
from tests.text.templates import CONVERSATIONS, TEMPLATES, TOOLS
from tests.text.test_sandbox import TWINS
from tests.text.test_tokenizer import CORPUS, write_bpe
from tests.text.vocabularies import KINDS, byte_level, write

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO = [{"role": "user", "content": "hello"}]
QUICK = Limits(seconds=0.2)
APART = "{% if false %}{{ x | wordwrap }}{% endif %}"  # makes vetting object, and writes nothing
BACKTRACKING = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
MULTIPLYING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 32}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with closing(Worker(apart.MODULE)) as worker:
        yield worker


def hostile(directory: Path, *, kind: str = "byte_level", **parts: Any) -> Path:
    """Write a tokenizer with an expression that backtracks, or with other harmful `parts`."""
    described = json.loads(KINDS[kind]().to_str())
    steps = [BACKTRACKING, *([described["pre_tokenizer"]] if described["pre_tokenizer"] else [])]
    described |= parts or {"pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
    write(directory, byte_level())
    (directory / "tokenizer.json").write_text(json.dumps(described))
    return directory


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_the_same_as_in_process(name: str, worker: Worker):
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    here = ChatTemplate({"default": TEMPLATES[name]}, variables)
    there = ChatTemplate({"default": APART + TEMPLATES[name]}, variables, worker=worker)

    def rendered(template: ChatTemplate, messages: list[Any], tools: Any) -> str:
        try:
            return template.render(messages, tools=tools)
        except InvalidRequest as error:
            return str(error)

    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            assert rendered(there, messages, tools) == rendered(here, messages, tools)
    assert (there.apart, here.apart) == (True, False)
    assert there.reads("tools") == here.reads("tools")


def test_a_slow_template_fails_its_own_request_only(worker: Worker):
    slow = ChatTemplate({"default": "{{ messages[0].content | wordwrap(1) }}"}, worker=worker)

    with pytest.raises(TooCostly, match=r"^chat template: took more than 1\.2 s") as refused:
        slow.render([{"role": "user", "content": "x" * 500_000}], limits=QUICK)
    assert refused.value.param == "messages"
    assert slow.render([{"role": "user", "content": "ab"}]) == "a\nb"


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(l=[]) %}{{ range(99999) | map('list') | sum(start=[]) }}",
        TWINS + "{{ ns.a == ns.b == ns.a }}",
        "{% set ns = namespace(t=1) %}{% for i in range(99999) %}{% set ns.t = (ns.t,) %}{% endfor %}{{ {ns.t: 1} }}",
        "{{ ('<a href=' * 99999) | striptags | length }}{{ 0x" + "f" * 50_000 + " // 0x" + "e" * 25_000 + " }}",
    ],
    ids=["sums of lists", "chains of comparisons", "deep keys", "numbers"],
)
def test_an_unvetted_template_ends_at_its_limit(source: str, worker: Worker, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(apart, "COMPILE_S", 0.5)  # compiling renders a message of one word
    template = ChatTemplate({"default": source}, worker=worker)

    with suppress(InvalidRequest, TextFailed):
        template.render(HELLO, limits=QUICK)
    assert ChatTemplate({"default": APART + "ok"}, worker=worker).render(HELLO) == "ok"


def test_a_broken_template_is_refused_with_its_mistake(worker: Worker):
    for source, reason in (("{% if %}", "wrong in line 1"), ("{{ x | nothing }}", "No filter named 'nothing'")):
        with pytest.raises(InvalidRequest, match=reason):
            ChatTemplate({"default": source}, worker=worker).render(HELLO)


def test_the_syntax_of_calls_is_chosen_by_rendering_in_the_worker(tmp_path: Path, worker: Worker):
    tokenizer = Tokenizer.load(write(tmp_path, byte_level()))
    template = ChatTemplate({"default": APART + TEMPLATES["qwen3"]}, worker=worker)

    found = Syntax.choose(tokenizer, template)

    assert found.tools is not None
    assert found.reasoning is not None


@pytest.mark.parametrize("kind", ["byte_level", "split_first", "sentencepiece", "unigram"])
def test_ids_and_texts_are_the_same_as_in_process(kind: str, tmp_path: Path, worker: Worker):
    directory = hostile(tmp_path, kind=kind)
    here, there = Tokenizer.load(directory), Tokenizer.load(directory, worker)

    assert (there.apart, here.apart) == (True, False)
    assert (there.vocab_size, there.special_ids, there.end_ids) == (here.vocab_size, here.special_ids, here.end_ids)
    for text in CORPUS:
        ids = here.encode(text)
        assert there.encode(text) == ids
        assert there.decode(ids) == here.decode(ids)
        assert there.decode(ids, skip_special_tokens=False) == here.decode(ids, skip_special_tokens=False)
        assert there.least_tokens(text) == here.least_tokens(text)
        stream = there.detokenizer()
        assert "".join(stream.feed([token_id]) for token_id in ids) + stream.flush() == here.decode(ids)
    for token in ("</s>", "<think>", "no such token"):
        assert there.id_of(token) == here.id_of(token)
    assert [there.has(token_id) for token_id in (0, there.vocab_size - 1, there.vocab_size, 10**6)] == [
        *(True, True, False, False)
    ]


def test_a_lone_surrogate_is_the_clients_mistake_in_the_worker_too(tmp_path: Path, worker: Worker):
    with pytest.raises(InvalidRequest, match="not valid Unicode at character 2"):
        Tokenizer.load(hostile(tmp_path), worker).encode("ok\ud800")


def test_a_text_over_which_an_expression_backtracks_fails_alone(tmp_path: Path, worker: Worker):
    tokenizer = Tokenizer.load(hostile(tmp_path), worker)
    expected = tokenizer.encode("the dog")

    with pytest.raises((TextFailed, TooCostly)):  # the library panics at its retry limit
        tokenizer.encode("a" * 40 + "b")
    assert tokenizer.encode("the dog") == expected


def test_a_panic_of_the_library_in_this_process_is_an_exception(tmp_path: Path):
    tokenizer = Tokenizer.load(hostile(tmp_path))

    with pytest.raises(TextFailed, match="retry-limit"):
        tokenizer.encode("a" * 40 + "b")


def test_a_text_that_is_multiplied_fails_alone(tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch):
    normalizer = {"type": "Sequence", "normalizers": [MULTIPLYING] * 8}
    tokenizer = Tokenizer.load(hostile(tmp_path, normalizer=normalizer), worker)
    expected = tokenizer.encode("the dog")

    monkeypatch.setattr(apart, "ENCODE_S", 0.5)

    with pytest.raises(TooCostly, match=r"the model's tokenizer took more than 0\.5 s over this text"):
        tokenizer.encode("aaaa")
    monkeypatch.undo()
    assert tokenizer.encode("the dog") == expected


def test_an_added_token_whose_white_space_another_strips_is_a_reason_to_run_apart(tmp_path: Path, worker: Worker):
    flags = {"single_word": False, "normalized": False, "special": False}
    blank = {"id": 900, "content": " ", "lstrip": True, "rstrip": False, **flags}
    mark = {"id": 901, "content": "<m>", "lstrip": True, "rstrip": True, **flags}

    assert Tokenizer.load(hostile(tmp_path, added_tokens=[blank, mark]), worker).apart
    assert not Tokenizer.load(hostile(tmp_path, added_tokens=[mark]), worker).apart


def test_an_added_token_that_normalization_empties_makes_the_tokenizer_run_apart(tmp_path: Path, worker: Worker):
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    blank = {"id": 900, "content": " ", "normalized": True, **flags}
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    tokenizer = Tokenizer.load(hostile(tmp_path, added_tokens=[blank], normalizer=strip), worker)

    assert "the added token ' '" in worker.reasons["tokenizer"]
    with pytest.raises(TextFailed):
        tokenizer.encode("é")
    assert tokenizer.encode("e") == tokenizer.encode("e")


def test_a_tokenizer_without_a_table_of_pieces_is_refused_in_the_worker(tmp_path: Path, worker: Worker):
    directory = hostile(tmp_path, kind="wordpiece")

    with pytest.raises(CheckpointError, match=r"tokenizer\.json: infd has no table for its decoder"):
        Tokenizer.load(directory, worker)


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"model": {"type": "BPE", "vocab": {}, "merges": [["a"]]}}'])
def test_a_broken_file_is_named_from_there_too(content: str, tmp_path: Path, worker: Worker):
    (write(tmp_path, byte_level()) / "tokenizer.json").write_text(content)

    with pytest.raises(CheckpointError, match=r"tokenizer\.json: "):
        Tokenizer.load(tmp_path, worker)


def test_older_files_are_converted_apart_and_then_run_in_process(tmp_path: Path, worker: Worker):
    directory = write_bpe(tmp_path, "Qwen2Tokenizer")

    there, here = Tokenizer.load(directory, worker), Tokenizer.load(directory)

    assert not there.apart
    assert [there.encode(text) for text in CORPUS] == [here.encode(text) for text in CORPUS]
