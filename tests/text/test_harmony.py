"""Answers in channels (gpt-oss): thoughts, calls and content, however the text arrives."""

from __future__ import annotations

import json
import random

import pytest

from infd.text import answers
from infd.text.answers.harmony import Harmony
from infd.text.chat import ChatTemplate
from infd.text.harmony_marks import MARKS
from infd.text.markup import Reading
from infd.text.syntax import Syntax
from infd.text.tools.offered import Offered
from tests.text.templates import published
from tests.text.test_tool_syntaxes import drawn
from tests.text.transcripts import Message, cuts, read
from tests.text.vocabularies import byte_level, wrap
from tests.thorough import among

OFFERED = Offered({"weather": b"{}"})
ASKED = "<|start|>user<|message|>hi<|end|><|start|>assistant"
FINAL = ASKED + "<|channel|>final<|message|>"
THINKING = ASKED + "<|channel|>analysis<|message|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Zürich"}'
CALLED = (("weather", '{"city": "Zürich"}'),)

TRANSCRIPTS = {
    "thought and answer": (
        ASKED,
        (
            "<|channel|>analysis<|message|>Two and two.<|end|>"
            "<|start|>assistant<|channel|>final<|message|> Four.\n<|return|>"
        ),
        Message(" Four.\n", "Two and two."),
    ),
    "an answer without thought": (ASKED, "<|channel|>final<|message|>Four.", Message("Four.")),
    "an answer without header": (ASKED, '{"a": 1}', Message('{"a": 1}')),
    "an answer that begins as a header does": (ASKED, "to be", Message("to be")),
    "an answer in a prompt's header": (FINAL, "a < b <| c", Message("a < b <| c")),
    "a thought in a prompt's header": (
        THINKING,
        "a<|end|><|start|>assistant<|channel|>final<|message|>b",
        Message("b", "a"),
    ),
    "thought and call": (
        ASKED,
        "<|channel|>analysis<|message|>Ask.<|end|><|start|>assistant" + CALL + "<|call|>",
        Message("", "Ask.", CALLED),
    ),
    "a call that ends without mark": (ASKED, CALL, Message("", "", CALLED)),
    "a call in the header's beginning": (
        ASKED,
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Zürich"}<|call|>',
        Message("", "", CALLED),
    ),
    "a call in the thought's channel": (
        ASKED,
        '<|channel|>analysis to=functions.weather code<|message|>{"city": "Zürich"}',
        Message("", "", CALLED),
    ),
    "a call of a tool of the model's own": (
        ASKED,
        "<|channel|>analysis to=python code<|message|>print(1 < 2)<|call|>",
        Message("", "", (("python", "print(1 < 2)"),)),
    ),
    "two calls": (
        ASKED,
        CALL + "<|call|><|start|>assistant" + CALL + "<|call|>",
        Message("", "", CALLED * 2),
    ),
    "a mark in a string": (
        ASKED,
        (
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "a<|end|>b\\"<|call|>"} <|call|>'
        ),
        Message("", "", (("weather", '{"city": "a<|end|>b\\"<|call|>"} '),)),
    ),
    "text before a call": (
        ASKED,
        "<|channel|>commentary<|message|>I shall ask.<|end|><|start|>assistant" + CALL,
        Message("I shall ask.", "", CALLED),
    ),
    "a message after a message": (
        ASKED,
        "<|channel|>commentary<|message|>One.<|end|>\n<|start|>assistant<|channel|>final<|message|>Two.",
        Message("One.\nTwo."),
    ),
    "two thoughts without marks between": (
        ASKED,
        "<|channel|>analysis<|message|>a<|channel|>analysis<|message|>b<|start|>assistant<|channel|>final<|message|>c",
        Message("c", "a\nb"),
    ),
    "a header that repeats the prompt's": (
        ASKED,
        "<|start|>assistant<|channel|>analysis<|message|>a<|end|>b",
        Message("b", "a"),
    ),
    "a header that never ends": (
        ASKED,
        "<|channel|>final " + "x" * 1100,
        Message("<|channel|>final " + "x" * 1100),
    ),
    "a header with a mark in its middle": (
        ASKED,
        "<|channel|>final<|end|><|start|>assistant<|channel|>final<|message|>a",
        Message("<|channel|>final\na"),
    ),
    "cut in a header": (ASKED, "<|channel|>anal", Message()),
    "cut in a thought": (ASKED, "<|channel|>analysis<|message|>Two and <", Message("", "Two and <")),
    "cut in a call": (ASKED, CALL[:-4], Message("", "", (("weather", '{"city": "Züri'),))),
    "nothing": (ASKED, "", Message()),
}


def chat_template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, {})


def start(prompt: str, offered: Offered | None = OFFERED) -> Reading:
    return Reading(Harmony().start(prompt, "", offered))


@pytest.mark.parametrize("name", TRANSCRIPTS)
@pytest.mark.histories
def test_a_transcript_is_the_same_message_wherever_it_is_cut(name: str):
    prompt, answer, message = TRANSCRIPTS[name]
    assert read(start(prompt), [answer]) == message
    for parts in cuts(answer) if len(answer) < 1000 else [list(answer), [answer[:500], answer[500:]]]:
        assert read(start(prompt), parts) == message, parts


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_an_answer_that_ends_early_has_the_beginning_of_the_whole_message(name: str):
    prompt, answer, message = TRANSCRIPTS[name]
    for end in range(0, len(answer), 1 + len(answer) // 300):
        cut = read(start(prompt), [answer[:end]])
        assert read(start(prompt), list(answer[:end])) == cut
        assert cut.calls[:-1] == message.calls[: max(0, len(cut.calls) - 1)]
        if cut.calls:
            name_so_far, arguments = cut.calls[-1]
            whole_name, whole_arguments = message.calls[len(cut.calls) - 1]
            assert name_so_far == whole_name
            assert whole_arguments.startswith(arguments.rpartition("<")[0] if "<" in arguments else arguments)


def test_without_tools_a_call_is_content():
    assert read(start(ASKED, None), [CALL]) == Message(CALL)


def test_the_tokens_of_a_thought_are_counted():
    reading = start(ASKED)
    parts = ["<|channel|>", "analysis", "<|message|>", "Two", " and", "<|end|>", "<|start|>", "assistant"]
    parts += ["<|channel|>", "final", "<|message|>", "Four"]
    for part in parts:
        reading.feed(part)
        reading.count()
    aside = reading.take()
    assert aside is not None
    assert (aside.thought, aside.thought_tokens) == ("Two and", 4)  # its text, and a mark on either side


def test_a_continued_answer_is_content():
    assert read(Reading(Harmony().start("x" * 64, "Fo", OFFERED)), ["ur"]) == Message("ur")
    assert Harmony().thought("x" * 64, "Fo") is None


@pytest.mark.parametrize(("prompt", "inside"), [(ASKED, False), (THINKING, True), (FINAL, None)])
def test_a_thought_precedes_the_answer_unless_the_prompt_opens_the_answer(prompt: str, inside: bool | None):
    thought = Harmony().thought(prompt, "")
    assert (None if thought is None else thought.inside) == inside


@pytest.mark.histories
def test_soups_of_marks_are_the_same_message_however_they_arrive():
    draw = random.Random(0)
    pieces = [*MARKS, *(mark[:5] for mark in MARKS), "assistant", "analysis", "commentary", "final", " to=functions.f"]
    pieces += ["json", "{", "}", '"', "\\", "a", "é", " ", "\n", "<", "|", '{"a": 1}', " to=", "user"]
    for _ in range(among(1500, 4000, 10_000)):
        prompt = draw.choice([ASKED, FINAL, THINKING, "x"])
        text = "".join(draw.choices(pieces, k=draw.randrange(16)))
        whole = read(start(prompt), [text])
        assert read(start(prompt), list(text)) == whole, (prompt, text)
        if not any(mark in text for mark in MARKS):
            joined = whole.content + whole.thought
            assert joined == text or (prompt == ASKED and joined == ""), text


def test_auto_finds_channels_in_the_published_template_only():
    found = [name for name, template in published().items() if Harmony().matches(chat_template(template))]
    assert found == ["llama.cpp/openai-gpt-oss-120b"]
    syntax = Syntax.choose(wrap(byte_level()), chat_template(published()[found[0]]))
    assert syntax.whole is answers.SYNTAXES[answers.ALIASES["openai"]]


def test_random_calls_that_the_published_template_writes_are_read_back():
    chat = chat_template(published()["llama.cpp/openai-gpt-oss-120b"])
    draw = random.Random(1)
    for _ in range(200):
        arguments = {key: drawn(draw) for key in draw.sample(["city", "days", "a_b", "x"], draw.randrange(4))}
        function = {"name": draw.choice(["weather", "get_all", "f-2"]), "arguments": arguments}
        messages = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        ]
        text = chat.render(messages, add_generation_prompt=False)
        turn = text.rpartition("<|start|>assistant")[2]
        ((name, written),) = read(start(ASKED), [turn]).calls
        assert (name, json.loads(written)) == (function["name"], arguments), turn
