"""The chat template decides how thoughts and calls are parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infd.errors import ConfigError
from infd.text import answers, reasoning, tools
from infd.text.chat import ChatTemplate
from infd.text.reply import Reply
from infd.text.stops import StopStrings
from infd.text.syntax import Syntax, check_names
from infd.text.tools.families_json import HERMES
from infd.text.tools.offered import Offered
from tests.text.templates import TEMPLATES
from tests.text.transcripts import Message, message_of
from tests.text.vocabularies import KINDS, byte_level, wrap

if TYPE_CHECKING:
    from types import ModuleType

    from infd.text.markup import Aside

TOKENIZER = wrap(byte_level())


def aside_of(reply: Reply) -> Aside | None:
    return None if reply.reading is None else reply.reading.take()


def chosen(template: str, **names: str) -> tuple[str | None, str | None]:
    syntax = Syntax.choose(TOKENIZER, ChatTemplate({"default": template}, {"eos_token": "</s>"}), **names)
    return (
        next((name for name, known in reasoning.SYNTAXES.items() if known is syntax.reasoning), None),
        next((name for name, known in tools.SYNTAXES.items() if known is syntax.tools), None),
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_family_is_read_as_its_template_writes(name: str):
    expected = {
        "qwen2_5": (None, "hermes"),
        "qwen3": ("qwen3", "hermes"),
        "glm4": ("qwen3", "glm45"),
        "granite": (None, "granite"),
        "llama3_1": (None, "llama3_json"),
        "mistral": (None, "mistral_list"),
    }

    assert chosen(TEMPLATES[name]) == expected.get(name, (None, None))


def test_a_mark_alone_is_not_a_syntax():
    """Qwen3-Coder and GLM-4.5 use the same marks around another form."""
    other = (
        "{{ messages[0].content }}<tool_call>\n<function={{ messages[1].tool_calls[0].function.name }}>\n</tool_call>"
    )

    assert chosen(other) == (None, None)
    assert chosen("{{ raise_exception('no') }}") == (None, None)
    assert chosen("{% if x %}") == (None, None)


def test_a_name_counts_more_than_the_template():
    assert chosen("plain", reasoning_name="qwen3", tools_name="hermes") == ("qwen3", "hermes")
    assert chosen(TEMPLATES["qwen3"], reasoning_name="none", tools_name="none") == (None, None)


def test_an_unknown_name_is_refused_with_the_known_names():
    for names in ({"tools_name": "no_such"}, {"reasoning_name": "no_such"}):
        with pytest.raises(ConfigError, match=r"'no_such'; known: .*qwen"):
            Syntax.choose(TOKENIZER, ChatTemplate({"default": "plain"}), **names)
        with pytest.raises(ConfigError, match="'no_such'"):
            check_names(**({"reasoning_name": "auto", "tools_name": "none"} | names))
    check_names(reasoning_name="qwen3", tools_name="llama3")


@pytest.mark.parametrize("known", [tools, reasoning, answers])
def test_names_of_other_servers_map_to_syntaxes_that_exist(known: ModuleType):
    assert set(known.ALIASES.values()) <= {*known.SYNTAXES, "none"}
    assert not set(known.ALIASES) & {*known.SYNTAXES, "auto", "none"}


def test_a_parser_of_another_package_is_loaded_when_it_is_named(monkeypatch: pytest.MonkeyPatch):
    loaded = []

    class Entry:
        value = "package:syntax"

        def load(self) -> object:
            loaded.append(1)
            return HERMES

    monkeypatch.setattr(
        "infd.text.syntax.entry_points",
        lambda group, name: [Entry()] if (group, name) == ("infd.tools", "theirs") else [],
    )
    assert chosen("plain", tools_name="theirs") == (None, "hermes")
    assert chosen("plain") == (None, None)
    assert loaded == [1]


def test_a_parser_is_made_only_if_the_reply_may_have_something_to_parse():
    qwen3 = Syntax.choose(TOKENIZER, ChatTemplate({"default": TEMPLATES["qwen3"]}))

    assert qwen3.start("<think>\n\n</think>\n\n") is None
    assert qwen3.start("") is not None
    assert qwen3.start("<think>\n\n</think>\n\n", offered=Offered({"f": b""})) is not None
    assert Syntax().start("", offered=Offered({"f": b""})) is None


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "wordpiece"])
def test_marks_are_seen_even_where_the_tokenizer_hides_them(kind: str):
    backend = KINDS[kind]()
    backend.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    vocabulary = wrap(backend)
    syntax = Syntax.choose(vocabulary, ChatTemplate({"default": TEMPLATES["qwen3"]}))
    ids = vocabulary.encode("<think>fox</think></s>dog", add_special_tokens=False)
    assert {vocabulary.id_of(mark) for mark in ("<think>", "</think>")} <= vocabulary.special_ids

    reply = Reply(vocabulary, reading=syntax.start(""), mark_ids=syntax.mark_ids)
    reply.feed(ids)
    content = reply.finish()

    message = message_of(content, [aside_of(reply)])
    assert (message.thought.strip(), message.content.strip()) == ("fox", "dog")
    plain = Reply(vocabulary)
    plain.feed(ids)
    assert plain.finish() == vocabulary.decode(ids)
    assert "think" not in vocabulary.decode(ids)


ANSWER = (
    '<think>\nwhich 你 fox?\n</think>\n\nThe dog. 🙂\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
)
MESSAGE = Message("The dog. 🙂", "which 你 fox?", (("f", '{"a": "é"}'),))


@pytest.mark.parametrize("stops", [(), ("never", "<tool_calls>", "\n\nX")])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_a_reply_is_the_same_however_its_tokens_come(kind: str, stops: tuple[str, ...]):
    vocabulary = wrap(KINDS[kind]())
    syntax = Syntax.choose(vocabulary, ChatTemplate({"default": TEMPLATES["qwen3"]}))
    ids = vocabulary.encode(ANSWER, add_special_tokens=False)
    counts = set()
    for first in range(len(ids) + 1):
        for second in {first, (first + len(ids)) // 2}:
            reply = Reply(
                vocabulary,
                StopStrings(stops),
                reading=syntax.start("", offered=Offered({"f": b""})),
                mark_ids=syntax.mark_ids,
            )
            content, asides = "", []
            for part in (ids[:first], ids[first:second], ids[second:]):
                reply.feed(part)
                content += reply.take()
                asides.append(aside_of(reply))
            content += reply.finish()
            asides.append(aside_of(reply))
            if kind == "byte_level":  # the other kind writes spaces around marks
                assert message_of(content, asides) == MESSAGE
            counts.add(
                (message_of(content, asides), sum(aside.thought_tokens for aside in asides if aside is not None))
            )
    assert len(counts) == 1
