"""The chat template decides how thoughts and calls are parsed."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args, get_type_hints

import pytest

from infd.config import ModelConfig
from infd.text import reasoning, tools
from infd.text.chat import ChatTemplate
from infd.text.reply import Reply
from infd.text.stops import StopStrings
from infd.text.syntax import Syntax
from tests.text.templates import TEMPLATES
from tests.text.transcripts import Message, message_of
from tests.text.vocabularies import KINDS, byte_level, wrap

if TYPE_CHECKING:
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
    expected = {"qwen2_5": (None, "hermes"), "qwen3": ("qwen3", "hermes"), "glm4": ("qwen3", None)}

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


def test_the_settings_know_every_syntax():
    hints = get_type_hints(ModelConfig)

    assert set(get_args(hints["tool_parser"])) == {"auto", "none", *tools.SYNTAXES}
    assert set(get_args(hints["reasoning_parser"])) == {"auto", "none", *reasoning.SYNTAXES}


def test_a_parser_is_made_only_if_the_reply_may_have_something_to_parse():
    qwen3 = Syntax.choose(TOKENIZER, ChatTemplate({"default": TEMPLATES["qwen3"]}))

    assert qwen3.start("<think>\n\n</think>\n\n") is None
    assert qwen3.start("") is not None
    assert qwen3.start("<think>\n\n</think>\n\n", names=["f"]) is not None
    assert Syntax().start("", names=["f"]) is None


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
                vocabulary, StopStrings(stops), reading=syntax.start("", names=["f"]), mark_ids=syntax.mark_ids
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
