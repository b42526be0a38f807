"""Every syntax of tool calls in the registry: equal results however an answer arrives, and no text is lost."""

from __future__ import annotations

import random
from functools import cache

import pytest

from infd.text import tools
from infd.text.chat import ChatTemplate
from infd.text.markup import Reading, overlap
from infd.text.syntax import Syntax
from infd.text.tools.offered import Offered
from tests.text.syntaxes import families
from tests.text.templates import published
from tests.text.transcripts import Message, cuts, read
from tests.text.vocabularies import byte_level, wrap

FAMILIES = families()
TOKENIZER = wrap(byte_level())
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def start(name: str) -> Reading:
    return Reading(calls=tools.SYNTAXES[name].start(Offered(FAMILIES[name].schemas)))


@cache
def chosen(template: str) -> str | None:
    """Return the name of the syntax that "auto" chooses for a published template."""
    syntax = Syntax.choose(TOKENIZER, ChatTemplate({"default": published()[template]}, VARIABLES))
    return next((name for name, known in tools.SYNTAXES.items() if known is syntax.tools), None)


def test_every_syntax_has_its_transcripts():
    assert set(FAMILIES) == set(tools.SYNTAXES)
    assert all(family.transcripts for family in FAMILIES.values())


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in FAMILIES for what in FAMILIES[name].transcripts])
def test_a_transcript_is_the_same_message_wherever_it_is_cut(name: str, what: str):
    answer, message = FAMILIES[name].transcripts[what]
    assert read(start(name), [answer]) == message
    for parts in cuts(answer):
        assert read(start(name), parts) == message, parts


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in FAMILIES for what in FAMILIES[name].transcripts])
def test_an_answer_that_ends_early_is_the_same_message_wherever_it_is_cut(name: str, what: str):
    answer, message = FAMILIES[name].transcripts[what]
    for end in range(len(answer)):
        cut = read(start(name), [answer[:end]])
        assert read(start(name), list(answer[:end])) == cut
        for called, whole in zip(cut.calls[:-1], message.calls, strict=False):
            assert called == whole
        if cut.calls and len(cut.calls) <= len(message.calls):
            name_so_far, arguments = cut.calls[-1]
            whole_name, whole_arguments = message.calls[len(cut.calls) - 1]
            assert name_so_far == whole_name
            part = max(overlap(arguments, mark) for mark in tools.SYNTAXES[name].marks)  # of a mark that was cut
            assert whole_arguments.startswith((arguments, arguments[: len(arguments) - part]))


@pytest.mark.parametrize(("name", "template"), [(name, each) for name in FAMILIES for each in FAMILIES[name].templates])
def test_a_published_template_is_read_by_its_syntax(name: str, template: str):
    assert chosen(template) == name


@pytest.mark.parametrize("name", FAMILIES)
def test_soups_of_marks_are_the_same_message_however_they_arrive(name: str):
    marks = tools.SYNTAXES[name].marks
    pieces = [*marks, *(mark[: len(mark) // 2] for mark in marks), *(mark[1:] for mark in marks)]
    pieces += ["{", "}", "[", "]", '"', ":", ",", ";", "\n", " ", "a", "é", "\\", "<", ">", "=", "|", "```", "()"]
    pieces += ['{"name": "f", "arguments": {', '{"name"', '{"a": 1}', "f(a=1)"]
    for answer, _ in FAMILIES[name].transcripts.values():
        pieces += [answer[place : place + 12] for place in range(0, len(answer), 12)]
    draw = random.Random(name)
    for _ in range(1000):
        text = "".join(draw.choices(pieces, k=draw.randrange(16)))
        whole = read(start(name), [text])
        assert read(start(name), list(text)) == whole, text
        cut = draw.randrange(len(text) + 1)
        assert read(start(name), [text[:cut], text[cut:]]) == whole, text
        if not whole.calls:
            assert whole == Message(text), text
