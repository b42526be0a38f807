"""Functionary 3.2's answers, in parts with recipients: read however they arrive, forced, and found in the template."""

from __future__ import annotations

import json
import random
from itertools import takewhile

import pytest

from infd.constraint import Calls, Headed, Regex, ToolSchema
from infd.grammar.protocol import Limits, Vocabulary
from infd.text import answers
from infd.text.chat import ChatTemplate
from infd.text.markup import Reading
from infd.text.syntax import Syntax
from infd.text.tools.offered import Offered
from tests.grammar import engines
from tests.grammar.vocabularies import walk
from tests.text.syntaxes.family import NOW, ODD, PARIS, ROME
from tests.text.templates import published
from tests.text.transcripts import Message, cuts, read
from tests.text.vocabularies import byte_level, wrap

SYNTAX = answers.SYNTAXES["functionary_v32"]
ASKED = "<|start_header_id|>assistant<|end_header_id|>\n\n>>>"
TEMPLATE = published()["llama.cpp/meetkai-functionary-medium-v3.2"]


def start(prompt: str = ASKED, *, tools: bool = True) -> Reading:
    return Reading(SYNTAX.start(prompt, "", Offered({}) if tools else None))


def call(name: str, arguments: str) -> str:
    return f"{name}\n{arguments}"


TRANSCRIPTS = {
    "an answer": ("all\nFour >> three.\n", Message("Four >> three.\n")),
    "one call": (call(*PARIS), Message(calls=(PARIS,))),
    "two calls": (f"{call(*PARIS)}>>>{call(*ROME)}", Message(calls=(PARIS, ROME))),
    "a text before two calls": (
        f"all\nLet me see.>>>{call(*NOW)}>>>{call(*PARIS)}",
        Message("Let me see.", "", (NOW, PARIS)),
    ),
    "a text after a call": (f"{call(*PARIS)}>>>all\nDone.", Message("Done.", calls=(PARIS,))),
    "arguments of every kind": (call("f", ODD), Message(calls=(("f", ODD),))),
    "marks within a text": (call("f", '{"a": ">>>all\\n"}'), Message(calls=(("f", '{"a": ">>>all\\n"}'),))),
    "cut within the arguments": ('f\n{"a": "b', Message(calls=(("f", '{"a": "b'),))),
    "cut within the name": ("weath", Message("weath")),
    "code for a tool": ("python\nprint(1)", Message("python\nprint(1)")),
    "a prompt of Python": ("all\n>>> print(1)\n1", Message(">>> print(1)\n1")),
    "no recipient": ("Four, five", Message("Four, five")),
}


@pytest.mark.parametrize("what", TRANSCRIPTS)
def test_a_transcript_is_the_same_message_wherever_it_is_cut(what: str):
    answer, message = TRANSCRIPTS[what]
    for parts in ([answer], *cuts(answer)):
        assert read(start(), parts) == message, parts


@pytest.mark.parametrize("what", TRANSCRIPTS)
def test_an_answer_that_ends_early_keeps_its_complete_calls(what: str):
    answer, message = TRANSCRIPTS[what]
    for end in range(len(answer)):
        cut = read(start(), [answer[:end]])
        assert read(start(), list(answer[:end])) == cut
        assert list(takewhile(lambda pair: pair[0] == pair[1], zip(cut.calls[:-1], message.calls, strict=False))) == [
            *zip(cut.calls[:-1], message.calls, strict=False)
        ]


def test_without_tools_an_answer_has_no_call_and_loses_no_text():
    for answer, message in TRANSCRIPTS.values():
        found = read(start(tools=False), [answer])
        assert not found.calls
        assert len(found.content) >= len(message.content)
    assert read(start(tools=False), ["f\n{}"]) == Message("f\n{}")


def test_soups_of_marks_are_the_same_message_however_they_arrive():
    draw = random.Random(1)
    pieces = [">>>", ">", ">>", "all\n", "all", "f\n", "f", "{", "}", '"', "\n", " ", '{"a": 1}', "é", "\\", "python\n"]
    for _ in range(2000):
        text = "".join(draw.choices(pieces, k=draw.randrange(16)))
        for prompt in (ASKED, "assistant"):
            whole = read(start(prompt=prompt), [text])
            assert read(start(prompt=prompt), list(text)) == whole, text


def test_the_template_selects_the_syntax_and_its_calls_are_read_back():
    template = ChatTemplate({"default": TEMPLATE}, {"bos_token": "<s>"})
    assert Syntax.choose(wrap(byte_level()), template).whole is SYNTAX
    calls = [
        {"id": "1", "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
        for name, arguments in (PARIS, NOW)
    ]
    messages = [{"role": "user", "content": "\ufdd1"}, {"role": "assistant", "content": "Hm.", "tool_calls": calls}]
    prompt = template.render(messages[:1], tools=None, add_generation_prompt=True)
    text = template.render(messages, tools=None, add_generation_prompt=False)
    answer = text.removeprefix(prompt).removesuffix("<|eot_id|>")
    found = read(start(prompt=prompt[-64:]), [answer])
    assert found.content == "Hm."
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [
        (name, json.loads(arguments)) for name, arguments in (PARIS, NOW)
    ]
    assert Syntax(whole=SYNTAX).thought(prompt) is None
    assert not Syntax(whole=SYNTAX).always_thinks(prompt)


@pytest.mark.usefixtures("engine")
def test_calls_and_constrained_answers_are_forced_with_their_recipients():
    pieces = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    compiler = engines.compiler(Vocabulary(pieces, frozenset({256}), frozenset({256}), 257, lambda text: [], False))
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = tuple(ToolSchema(name, json.dumps(schema), name) for name in ("get", "get.all-2"))
    assert SYNTAX.grammar is not None
    header = SYNTAX.header(ASKED, "")
    assert header is not None
    finished = 0
    for seed in range(6):
        for required in (True, False):
            constraint = Calls(
                SYNTAX.grammar, tools, required, True, None if required else Headed(header, Regex("x{3}"))
            )
            matcher = compiler.compile(constraint, Limits()).matcher()
            tokens = walk(compiler, matcher, random.Random(seed), 300, ends=0.3)
            if tokens[-1] != 256:
                continue
            finished += 1
            found = read(start(), [bytes(tokens[:-1]).decode()])
            assert found.calls or not required
            assert found.content == ("" if found.calls else "xxx")
            assert all(name in ("get", "get.all-2") and set(json.loads(each)) == {"a"} for name, each in found.calls)
    assert finished
    assert SYNTAX.header(ASKED, "So") is None
