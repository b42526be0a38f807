"""Every syntax of tool calls in the registry: equal results however an answer arrives, and no text is lost."""

from __future__ import annotations

import json
import lzma
import random
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infd.text import tools
from infd.text.chat import ChatTemplate
from infd.text.markup import Asides, Reading
from infd.text.reply import Reply
from infd.text.syntax import Syntax
from infd.text.tools.offered import Offered
from tests.text.syntaxes import families
from tests.text.templates import published
from tests.text.transcripts import Arriving, Message, cuts, message_of, read
from tests.text.vocabularies import KINDS, byte_level, wrap
from tests.thorough import THOROUGH, among

if TYPE_CHECKING:
    from infd.text.tokenizer import Tokenizer

FAMILIES = families()
TOKENIZER = wrap(byte_level())
SHAPES = ("hermes", "kimi_k2", "qwen3_coder", "glm47", "pythonic", "gemma4")  # one family of each shape
QUESTION = "\ufdd1"
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}


def start(name: str) -> Reading:
    return Reading(calls=tools.SYNTAXES[name].start(Offered(FAMILIES[name].schemas)))


@cache
def chat_of(template: str) -> ChatTemplate:
    return ChatTemplate({"default": published()[template]}, VARIABLES)


@cache
def chosen(template: str) -> str | None:
    """Return the name of the syntax that "auto" chooses for a published template."""
    syntax = Syntax.choose(TOKENIZER, chat_of(template))
    return next((name for name, known in tools.SYNTAXES.items() if known is syntax.tools), None)


def test_every_syntax_has_its_transcripts():
    assert set(FAMILIES) == set(tools.SYNTAXES)
    assert all(family.transcripts for family in FAMILIES.values())


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in FAMILIES for what in FAMILIES[name].transcripts])
@pytest.mark.histories
def test_a_transcript_is_the_same_message_wherever_it_is_cut(name: str, what: str):
    answer, message = FAMILIES[name].transcripts[what]
    assert read(start(name), [answer]) == message
    for parts in cuts(answer):
        assert read(start(name), parts) == message, parts


@pytest.mark.parametrize(("name", "what"), [(name, what) for name in FAMILIES for what in FAMILIES[name].transcripts])
@pytest.mark.histories
def test_an_answer_that_ends_early_is_the_same_message_wherever_it_is_cut(name: str, what: str):
    answer, message = FAMILIES[name].transcripts[what]
    syntax, offered = tools.SYNTAXES[name], Offered(FAMILIES[name].schemas)
    characters = Arriving(Reading(calls=syntax.start(offered)), syntax, offered)
    places = range(len(answer))
    ends = places if THOROUGH else random.Random(answer).sample(places, min(12, len(answer)))
    for end in places:
        if end not in ends:
            characters.feed(answer[end])
            continue
        cut = read(start(name), [answer[:end]])
        assert characters.so_far() == cut
        characters.feed(answer[end])
        for called, whole in zip(cut.calls[:-1], message.calls, strict=False):
            assert called == whole
        if cut.calls and len(cut.calls) <= len(message.calls):
            name_so_far, arguments = cut.calls[-1]
            whole_name, whole_arguments = message.calls[len(cut.calls) - 1]
            assert name_so_far == whole_name
            same = takewhile(lambda pair: pair[0] == pair[1], zip(arguments, whole_arguments, strict=False))
            assert arguments[len(list(same)) :] in answer[:end]  # of a value or a mark that was cut


@pytest.mark.parametrize(("name", "template"), [(name, each) for name in FAMILIES for each in FAMILIES[name].templates])
def test_a_published_template_is_read_by_its_syntax(name: str, template: str):
    assert chosen(template) == name


# Templates that tell the model how to call, but write no past call.
DESCRIBED = {
    "granite-common/granite-3.2": "granite",
    "llama.cpp/ibm-granite-granite-3.3-2B-Instruct": "granite",
    "llama.cpp/llama-cpp-deepseek-r1": "deepseek_v3",
    "vllm/glm4": "glm45",
}
UNREAD = {  # templates for which no syntax of calls is found, and why
    "llama.cpp/LFM2-8B-A1B": "has no mark of a call; found by the tokens of the vocabulary",
    "llama.cpp/LFM2.5-Instruct": "has no mark of a call; found by the tokens of the vocabulary",
    "llama.cpp/meetkai-functionary-medium-v3.2": "a syntax of whole answers reads its calls",
}


@pytest.mark.parametrize("template", DESCRIBED)
def test_calls_that_a_template_only_describes_are_found_by_their_marks(template: str):
    assert chosen(template) == DESCRIBED[template]


def test_a_template_without_the_marks_of_a_syntax_has_none():
    assert {chosen(template) for template in UNREAD} == {None}


@pytest.mark.parametrize("template", ["llama.cpp/LFM2-8B-A1B", "llama.cpp/LFM2.5-Instruct"])
def test_a_template_that_offers_tools_and_describes_no_call_is_read_by_the_tokens_of_the_vocabulary(template: str):
    chat = ChatTemplate({"default": published()[template]}, VARIABLES)
    assert Syntax.choose(tokenizer("lfm2", "byte_level"), chat).tools is tools.SYNTAXES["lfm2"]
    backend = KINDS["byte_level"]()
    backend.add_special_tokens(["<|tool_call_start|>", "<|python_tag|>"])  # parts of the marks are not enough
    assert Syntax.choose(wrap(backend), chat).tools is None
    plain = ChatTemplate({"default": "{{ messages[0].content }}"}, VARIABLES)
    assert Syntax.choose(tokenizer("lfm2", "byte_level"), plain).tools is None


@cache
def tokenizer(name: str, kind: str) -> Tokenizer:
    """Return a tokenizer in which the marks of a syntax are special tokens."""
    backend = KINDS[kind]()
    backend.add_special_tokens(list(tools.SYNTAXES[name].marks))
    return wrap(backend)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_transcript_is_the_same_message_however_its_tokens_arrive(name: str, kind: str):
    vocabulary, draw = tokenizer(name, kind), random.Random(name)
    marks = frozenset(vocabulary.special_ids)
    for answer, message in FAMILIES[name].transcripts.values():
        ids = vocabulary.encode(answer, add_special_tokens=False)
        found = set()
        for step in (1, len(ids) + 1, draw.randrange(2, 9), draw.randrange(2, 30)):
            reply = Reply(vocabulary, reading=start(name), mark_ids=marks)
            content, asides = "", []
            for at in range(0, len(ids), step):
                reply.feed(ids[at : at + step])
                content += reply.take()
                assert reply.reading is not None
                asides.append(reply.reading.take())
            content += reply.finish()
            assert reply.reading is not None
            asides.append(reply.reading.take())
            found.add(message_of(content, asides))
        assert len(found) == 1, answer
        if kind == "byte_level":  # the other kind writes spaces around marks
            assert found == {message}


def soups(name: str, count: int) -> None:
    """Parse random texts of marks, whole and in parts."""
    marks = tools.SYNTAXES[name].marks
    pieces = [*marks, *(mark[: len(mark) // 2] for mark in marks), *(mark[1:] for mark in marks)]
    pieces += ["{", "}", "[", "]", '"', ":", ",", ";", "\n", " ", "a", "é", "\\", "<", ">", "=", "|", "```", "()"]
    pieces += ['{"name": "f", "arguments": {', '{"name"', '{"a": 1}', "f(a=1)"]
    for answer, _ in FAMILIES[name].transcripts.values():
        pieces += [answer[place : place + 12] for place in range(0, len(answer), 12)]
    draw = random.Random(name)
    for _ in range(count):
        text = "".join(draw.choices(pieces, k=draw.randrange(16)))
        whole = read(start(name), [text])
        assert read(start(name), list(text)) == whole, text
        cut = draw.randrange(len(text) + 1)
        assert read(start(name), [text[:cut], text[cut:]]) == whole, text
        if not whole.calls:
            assert whole == Message(text), text


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.histories
def test_soups_of_marks_are_the_same_message_however_they_arrive(name: str):
    """One family of each shape reads ten times as many as the others in `make soak`."""
    soups(name, among(200, 500, 10_000 if name in SHAPES else 1000))


def drawn(draw: random.Random, depth: int = 3) -> Any:
    """Draw a JSON value: nested, empty, beyond ASCII, texts that look like other values or like marks."""
    texts = [
        "",
        "7",
        "-1.5",
        "true",
        "null",
        "{}",
        "[1]",
        "é🙂 你好",
        'a"b\\c',
        "a\nb",
        "<x> & 'y'",
        "</tool_call>",
        " a ",
    ]
    kind = draw.randrange(8 if depth else 6)
    match kind:
        case 0:
            return draw.choice([True, False, None])
        case 1:
            return draw.choice([0, -7, 12345678901, 1.5, -0.25])
        case 6:
            return [drawn(draw, depth - 1) for _ in range(draw.randrange(3))]
        case 7:
            return {draw.choice(["a", "b c", "é"]): drawn(draw, depth - 1) for _ in range(draw.randrange(3))}
        case _:
            return draw.choice(texts)


CALLS = among(40, 80, 200)


@pytest.mark.parametrize(("name", "template"), [(name, each) for name in FAMILIES for each in FAMILIES[name].templates])
@pytest.mark.histories
def test_random_calls_that_a_published_template_writes_are_read_back(name: str, template: str):
    family, draw, chat = FAMILIES[name], random.Random(template), chat_of(template)
    calls = 0
    for number in range(CALLS):
        arguments = {
            key: "a" if template in family.lossy else drawn(draw) or ""
            for key in draw.sample(["city", "days", "a_b", "x"], draw.randrange(4))
        }
        function = {"name": draw.choice(["weather", "get_all", "f-2"]), "arguments": arguments}
        schema = {"type": "object", "properties": {key: _schema(value) for key, value in arguments.items()}}
        described = {"name": function["name"], "description": "", "parameters": schema}
        messages = [
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"aaaaaa{number:03}", "type": "function", "function": function}],
            },
        ]
        text = chat.render(messages, tools=[{"type": "function", "function": described}], add_generation_prompt=False)
        offered = Offered({function["name"]: json.dumps(schema).encode()})
        parser, asides = tools.SYNTAXES[name].start(offered), Asides()
        turn = text.rpartition(QUESTION)[2]
        if getattr(tools.SYNTAXES[name], "bare", False):
            begin = turn.find('{"name"')
            turn = (
                turn[begin - turn[:begin].endswith("[") :]
                if begin >= 0
                else turn[turn.rindex("[", 0, turn.index("(")) :]
            )
        parser.feed(turn, asides)
        parser.finish(asides)
        aside = asides.take()
        assert aside is not None, turn
        (call,) = aside.calls
        assert (call.name, json.loads(call.arguments)) == (function["name"], arguments), turn
        calls += 1
    assert calls == CALLS


WRITTEN = json.loads(lzma.decompress(Path(__file__).with_name("written_calls.json.xz").read_bytes()))


@pytest.mark.parametrize("name", WRITTEN)
def test_random_calls_that_another_program_writes_are_read_back(name: str):
    """The families have no published template that writes calls, or one that writes a single call; TEMPLATES.md."""
    assert len(WRITTEN[name]) == 200
    for calls, text in WRITTEN[name]:
        offered = Offered(dict.fromkeys((called for called, _ in calls), b""))
        found = read(Reading(calls=tools.SYNTAXES[tools.ALIASES.get(name, name)].start(offered)), [text])
        assert found.content == ""
        assert [[called, json.loads(written)] for called, written in found.calls] == calls, text


def _schema(value: Any) -> dict[str, Any]:
    """Return the schema of a value, as a tool would state it."""
    match value:
        case bool():
            return {"type": "boolean", "description": ""}
        case str():
            return {"type": "string", "description": ""}
        case int():
            return {"type": "integer", "description": ""}
        case float():
            return {"type": "number", "description": ""}
        case list():
            return {"type": "array", "description": "", "items": {}}
    return {"type": "object", "description": "", "additionalProperties": {}}
