"""Answers in messages (Muse Glimmer, Inkling): thoughts, calls and content, however the text arrives.

Inkling's prompts are defined by code, so its transcripts follow the renderers and parsers of vLLM and SGLang.
"""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import pytest

from infd.constraint import AfterThought, Calls, Headed, Regex, ToolSchema
from infd.grammar.protocol import Limits, Vocabulary
from infd.text import answers
from infd.text.chat import ChatTemplate
from infd.text.markup import Reading
from infd.text.syntax import Syntax
from infd.text.tools.offered import Offered
from tests.grammar import engines
from tests.grammar.vocabularies import walk
from tests.text.templates import published
from tests.text.test_tag_values import KINDS, schema, value
from tests.text.transcripts import Message, cuts, read
from tests.text.vocabularies import byte_level, wrap
from tests.thorough import among

if TYPE_CHECKING:
    from typing import Any

    from infd.grammar.protocol import Compiler

SCHEMAS = {"weather": b'{"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}', "now": b"{}"}
OFFERED = Offered(SCHEMAS)
CITY = (("weather", '{"city": "Zürich", "days": 2}'),)
NOW = (("now", "{}"),)
MUSE, INKLING = "muse_glimmer", "inkling"
ASKED = {MUSE: "<|start|>user<|message|>hi<|eot|><|start|>assistant", INKLING: "hi<|end_message|><|message_model|>"}
BEGIN = {MUSE: "<|start|>assistant", INKLING: "<|message_model|>"}


def invoke(name: str, parameters: str) -> str:
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{parameters}</atem:invoke>\n</atem:function_calls>'


def muse(name: str, parameters: str = "") -> str:
    return f" to={name}<|message|>{invoke(name, parameters)}"


ZURICH = '<atem:parameter name="city">Zürich</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n'
ODD = '<atem:parameter name="city"><|eom|> <|start|>assistant\n</atem:invoke></atem:parameter>\n'
MUSE_TRANSCRIPTS = {
    "thought and answer": (
        " to=self<|message|>Two < three.<|eom|><|start|>assistant to=user<|message|> Four.\n<|eot|>",
        Message(" Four.\n", "Two < three."),
    ),
    "an answer without recipient": ("<|message|>Four.<|eot|>", Message("Four.")),
    "an answer without header": ("Four to=six", Message("Four to=six")),
    "an answer that begins as a header does": ("to be", Message("to be")),
    "thought and call": (
        f" to=self<|message|>Ask.<|eom|><|start|>assistant{muse('weather', ZURICH)}<|eot|>",
        Message("", "Ask.", CITY),
    ),
    "two calls": (
        f"{muse('now')}<|eom|><|start|>assistant{muse('weather', ZURICH)}<|eot|>",
        Message("", "", NOW + CITY),
    ),
    "two calls of one message": (
        f"{muse('now')}\n{invoke('weather', ZURICH)}<|eot|>",
        Message("", "", NOW + CITY),
    ),
    "a name that is written twice": (muse("weather.weather", ZURICH), Message("", "", CITY)),
    "a name in a namespace that was not offered": (muse("a.b"), Message("", "", (("a.b", "{}"),))),
    "marks in a value": (
        f"{muse('weather', ODD)}<|eom|><|start|>assistant{muse('now')}<|eot|>",
        Message("", "", (("weather", r'{"city": "<|eom|> <|start|>assistant\n</atem:invoke>"}'), *NOW)),
    ),
    "a call quoted in a thought": (
        f" to=self<|message|>{invoke('now', '')}<|eom|><|start|>assistant to=user<|message|>No.",
        Message("No.", invoke("now", "")),
    ),
    "a call quoted in an answer": (f" to=user<|message|>{invoke('now', '')}", Message(invoke("now", ""))),
    "a call that ends early": (
        f"{muse('weather').partition('</atem:invoke>')[0]}<|eom|><|start|>assistant to=user<|message|>No.<|eot|>",
        Message("No.", "", (("weather", "{"),)),
    ),
    "two answers": ("<|message|>One.<|eom|>\n<|start|>assistant to=user<|message|>Two.", Message("One.\nTwo.")),
    "a thought without its end": (
        " to=self<|message|>a<|start|>assistant to=user<|message|>b",
        Message("b", "a"),
    ),
    "text of another form in a call": (" to=now<|message|>Hm.<|eot|>", Message("Hm.")),
    "cut in a header": (" to=se", Message()),
    "nothing": ("", Message()),
}


def inkling(name: str, arguments: str) -> str:
    return f'{name}<|content_invoke_tool_json|>{{"name":"{name}","args":{arguments}}}<|end_message|>'


ZURICH_JSON = '{"city": "Zürich", "days": 2}'
ODD_JSON = '{"city":"<|end_message|>\\"<|message_model|>"}'
INKLING_TRANSCRIPTS = {
    "thought and answer": (
        "<|content_thinking|>Two < three.<|end_message|><|message_model|><|content_text|> Four.\n<|end_message|>",
        Message(" Four.\n", "Two < three."),
    ),
    "an answer that ends sampling": ("<|content_text|>Four.<|content_model_end_sampling|>", Message("Four.")),
    "an answer without header": ("Four. Five", Message("Four. Five")),
    "one word without header": ("Four", Message("Four")),
    "thought and call": (
        (
            f"<|content_thinking|>Ask.<|end_message|><|message_model|>{inkling('weather', ZURICH_JSON)}"
            "<|content_model_end_sampling|>"
        ),
        Message("", "Ask.", CITY),
    ),
    "two calls": (
        f"{inkling('now', '{}')}<|message_model|>{inkling('weather', ZURICH_JSON)}",
        Message("", "", NOW + CITY),
    ),
    "a call without a name in its header": (inkling("now", "{}").removeprefix("now"), Message("", "", NOW)),
    "marks in a string": (
        f"{inkling('weather', ODD_JSON)}<|message_model|>{inkling('now', '{}')}",
        Message("", "", (("weather", ODD_JSON), *NOW)),
    ),
    "text before a call": (
        f"<|content_text|>I shall ask.<|end_message|><|message_model|>{inkling('now', '{}')}",
        Message("I shall ask.", "", NOW),
    ),
    "a call that ends early": (
        (
            'weather<|content_invoke_tool_json|>{"name":"weather","args":{"city": "Z"'
            "<|end_message|><|message_model|><|content_text|>No."
        ),
        Message("No.", "", (("weather", '{"city": "Z"'),)),
    ),
    "text of another form in a call": ("now<|content_invoke_tool_json|>Hm.<|end_message|>", Message("Hm.")),
    "cut in a header": ("<|content_thin", Message()),
}
TRANSCRIPTS = {MUSE: MUSE_TRANSCRIPTS, INKLING: INKLING_TRANSCRIPTS}
EACH = [(family, what) for family, found in TRANSCRIPTS.items() for what in found]


def start(family: str, prompt: str | None = None, offered: Offered | None = OFFERED) -> Reading:
    return Reading(answers.SYNTAXES[family].start(ASKED[family] if prompt is None else prompt, "", offered))


@pytest.mark.parametrize(("family", "what"), EACH)
def test_a_transcript_is_the_same_message_wherever_it_is_cut(family: str, what: str):
    answer, message = TRANSCRIPTS[family][what]
    assert read(start(family), [answer]) == message
    for parts in cuts(answer):
        assert read(start(family), parts) == message, parts


@pytest.mark.parametrize(("family", "what"), EACH)
def test_an_answer_that_ends_early_has_the_beginning_of_the_whole_message(family: str, what: str):
    answer, message = TRANSCRIPTS[family][what]
    for end in range(len(answer)):
        cut = read(start(family), [answer[:end]])
        assert read(start(family), list(answer[:end])) == cut
        assert cut.calls[:-1] == message.calls[: max(0, len(cut.calls) - 1)]
        assert [name for name, _ in cut.calls] == [name for name, _ in message.calls[: len(cut.calls)]]
        assert message.thought.startswith(re.sub(r"<(\|.*)?$", "", cut.thought))  # without a mark that was cut


@pytest.mark.parametrize("family", TRANSCRIPTS)
@pytest.mark.histories
def test_soups_of_marks_are_the_same_message_however_they_arrive(family: str):
    draw = random.Random(family)
    marks = [*answers.SYNTAXES[family].marks, BEGIN[family]]
    pieces = [*marks, *(mark[:5] for mark in marks), " to=", "self", "user", "now", "é", " ", "\n", "<", "|", "a b"]
    for answer, _ in TRANSCRIPTS[family].values():
        pieces += [answer[place : place + 12] for place in range(0, len(answer), 12)]
    for _ in range(among(600, 1500, 3000)):
        text = "".join(draw.choices(pieces, k=draw.randrange(16)))
        whole = read(start(family), [text])
        assert read(start(family), list(text)) == whole, text
        if "<|" not in text and "to=" not in text:
            assert whole == Message(text), text


@pytest.mark.parametrize("family", TRANSCRIPTS)
def test_without_tools_a_call_is_content(family: str):
    answer, _ = TRANSCRIPTS[family]["two calls"]
    call = answer.partition(BEGIN[family])[0]
    call = call.removesuffix("<|eom|>").removesuffix("<|end_message|>")
    assert read(start(family, offered=None), [call]) == Message(call)


@pytest.mark.parametrize("family", TRANSCRIPTS)
def test_the_prompt_may_open_a_thought_or_the_answer(family: str):
    syntax = answers.SYNTAXES[family]
    thought = syntax.thought(ASKED[family], "")
    header = syntax.header(ASKED[family], "")
    assert thought is not None
    assert header is not None
    assert not thought.inside
    inside = syntax.thought(ASKED[family] + thought.opening, "")
    assert inside is not None
    assert inside.inside
    rest = f"a{thought.closing}{thought.after}{header.text}b"
    assert read(start(family, ASKED[family] + thought.opening), [rest]) == Message("b", "a")
    assert syntax.thought(ASKED[family] + header.text, "") is None
    assert syntax.header(ASKED[family] + header.text, "") is None
    assert read(start(family, ASKED[family] + header.text), ["to=b"]) == Message("to=b")
    assert read(Reading(syntax.start(ASKED[family], "Fo", OFFERED)), ["ur"]) == Message("ur")
    assert all(end.startswith(thought.closing + thought.after) for end in syntax.ends(calls=True))


@pytest.mark.parametrize("source", ["llama.cpp/muse-glimmer", "vllm/muse_glimmer"])
def test_random_calls_that_a_published_template_writes_are_read_back(source: str):
    chat = ChatTemplate({"default": published()[source]}, {"bos_token": ""})
    syntax = Syntax.choose(wrap(byte_level()), chat)
    assert syntax.whole is answers.SYNTAXES[answers.ALIASES["muse"]]
    draw = random.Random(1)
    for _ in range(200):
        kinds = {key: draw.choice(KINDS) for key in draw.sample(["city", "days", "a_b", "Ключ"], draw.randrange(4))}
        stated = {"$defs": {kind: {"type": kind} for kind in KINDS}}
        stated["properties"] = {key: schema(draw, kind) for key, kind in kinds.items()}
        arguments = {key: value(draw, kind) for key, kind in kinds.items()}
        function = {"name": draw.choice(["weather", "get.all", "f-2"]), "arguments": arguments}
        calls = [{"id": "c", "type": "function", "function": function}] * draw.choice([1, 2])
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "\ufdd1"},
            {"role": "assistant", "reasoning_content": "Hm.", "content": "", "tool_calls": calls},
        ]
        turn = chat.render(messages, add_generation_prompt=False).rpartition("\ufdd1<|eot|>")[2]
        offered = Offered({function["name"]: json.dumps(stated).encode()})
        reading = Reading(syntax.whole.start("<|eot|><|start|>assistant", "", offered))
        message = read(reading, [turn.removeprefix("<|start|>assistant")])
        assert (message.content, message.thought) == ("", "Hm.")
        assert [(name, json.loads(found)) for name, found in message.calls] == [
            (function["name"], arguments) for _ in calls
        ], turn


def test_auto_finds_messages_in_their_own_templates_only():
    templates = {name: ChatTemplate({"default": text}, {}) for name, text in published().items()}
    found = {name for name, each in templates.items() for key in TRANSCRIPTS if answers.SYNTAXES[key].matches(each)}
    assert found == {"llama.cpp/muse-glimmer", "vllm/muse_glimmer"}


@engines.each
def compiler(marks: tuple[str, ...]) -> Compiler:
    pieces = [*(bytes([byte]) for byte in range(256)), *map(str.encode, marks), b"<end>"]
    special = frozenset(range(256, len(pieces)))
    return engines.compiler(
        Vocabulary(pieces, special, frozenset({len(pieces) - 1}), len(pieces), lambda text: [], False)
    )


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("family", TRANSCRIPTS)
def test_forced_answers_are_read_as_they_were_forced(family: str, required: bool, spelled: bool):
    syntax = answers.SYNTAXES[family]
    thought, header = syntax.thought(ASKED[family], ""), syntax.header(ASKED[family], "")
    assert thought is not None
    assert header is not None
    assert syntax.grammar is not None
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "7"]}}}
    parameters |= {"required": ["a"], "additionalProperties": False}
    tool = ToolSchema("get.all-2", json.dumps(parameters), "tools[0]")
    otherwise = None if required else Headed(header, Regex("[0-9]{1,9}"))
    calls = Calls(syntax.grammar, (tool,), required, otherwise=otherwise)
    compiled = compiler(() if spelled else syntax.marks)
    constraint = AfterThought(thought, calls)
    draw, called, answered = random.Random(2), 0, 0
    for _ in range(6):
        tokens = walk(compiled, compiled.compile(constraint, Limits()).matcher(), draw, 900, ends=0.2)
        if tokens[-1] not in compiled.vocabulary.end_ids:
            continue
        text = b"".join(compiled.vocabulary.tokens[token] for token in tokens[:-1]).decode()
        message = read(start(family, offered=Offered({tool.name: tool.parameters.encode()})), [text])
        called += bool(message.calls)
        answered += message.content.isdigit()
        assert not (message.content and message.calls)
        assert not required or message.calls
        for name, arguments in message.calls:
            found = json.loads(arguments)
            assert name == tool.name
            assert isinstance(found["a"], int)
            assert found.get("b", "x") in ("x", "7")
    assert called or answered
