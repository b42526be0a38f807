"""The checkpoint's response template reads answers as transformers' own parser does, in bounded time."""

from __future__ import annotations

import functools
import json
import random
import re
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from infd.constraint import Calls, ToolSchema
from infd.errors import CheckpointError, ConfigError
from infd.grammar.llguidance import LlguidanceCompiler
from infd.grammar.protocol import Limits, Vocabulary
from infd.text.answers.response_template import ResponseTemplate
from infd.text.chat import ChatTemplate
from infd.text.markup import Reading
from infd.text.patterns import Exhausted, Pattern, Steps
from infd.text.syntax import Syntax, check_names
from infd.text.tools.offered import Offered
from tests.grammar.vocabularies import walk
from tests.text.templates import CHATML, published
from tests.text.transcripts import Message, cuts, read
from tests.text.vocabularies import byte_level, wrap
from tests.thorough import THOROUGH

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
TEMPLATES: dict[str, dict[str, Any]] = {
    "json": {
        "start_anchor": "<|assistant|>",
        "defaults": {"role": "assistant"},
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": ["<tool_call>", "<tool_call:new>"],
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"(?:<\|im_end\|>|$)"},
        },
    },
    "list": {
        "start_anchor_pattern": r"<\|assistant\|>",
        "fields": {
            "content": {"open": "<|START_RESPONSE|>", "close_pattern": r"(?:<\|END_RESPONSE\|>|$)"},
            "thinking": {"open": "<|START_THINKING|>", "close_pattern": r"(?:<\|END_THINKING\|>|$)"},
            "tool_calls": {
                "open": "<|START_ACTION|>",
                "close_pattern": r"(?:<\|END_ACTION\|>|$)",
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}},
                "transform_each": True,
            },
        },
    },
    "tags": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning_content": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"<tool_call>\s*<function=(?P<name>[\w.-]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                    "value_parser": {"name": "json", "args": {"allow_non_json": True}},
                },
                "transform": FUNCTION,
            },
            "content": {},
        },
    },
    "braces": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": FUNCTION,
            },
            "content": {},
        },
    },
    "lines": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+).*?:\n",
                "close": "\nEND",
                "repeats": True,
                "content": "kv-lines",
                "content_args": {"kv_sep": "=", "value_parser": {"name": "int"}},
                "transform": FUNCTION,
            },
            "content": {},
        },
    },
    "joined": {
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>", "repeats": True, "join": "\n"},
            "content": {"open": "<c>", "close": "</c>", "repeats": True, "join": " "},
        },
    },
}
ANSWERS: dict[str, list[str]] = {
    "json": [
        "<think>\nTwo < three.\n</think>\n\nFour.<|im_end|>",
        '<think>Ask.</think><tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>',
        (
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
            '<tool_call:new>{"name": "weather", "arguments": {"days": 2}}</tool_call>'
        ),
        "Four <tool> and <thin",
        "",
    ],
    "list": [
        (
            '<|START_THINKING|>Ask.<|END_THINKING|><|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "weather", '
            '"parameters": {"city": "Paris"}}, {"tool_name": "now", "parameters": {}}]<|END_ACTION|>'
        ),
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|> Four.\n",
        "<|START_THINKING|>Cut <|END_",
    ],
    "tags": [
        (
            "Opened by the start.\n</think>\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
            "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
        ),
        "a</think>b",
        "<think>  a</think><tool_call><function=now></function></tool_call>",
    ],
    "braces": [
        '<|channel>thought\nAsk.<channel|><|tool_call>call:weather{city:<|"|>a {b: "c"}<|"|>,days:2}<tool_call|>',
        "Four.",
    ],
    "lines": ["CALL weather now:\ndays=2\n hours = 3\nEND", "CALL me: maybe"],
    "joined": ["<t>a</t><t> b </t><c>x</c><c>y</c>"],
}
EACH = [(name, answer) for name, found in ANSWERS.items() for answer in found]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
)
_BYTES = [*(bytes([byte]) for byte in range(256)), b"<end>"]
COMPILER = LlguidanceCompiler(Vocabulary(_BYTES, frozenset({256}), frozenset({256}), 257, lambda text: [], False))
SCHEMAS = {"weather": b'{"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}', "now": b"{}"}


def start(name: str, prompt: str = "<|assistant|>") -> Reading:
    return Reading(ResponseTemplate(TEMPLATES[name]).start(prompt, "", Offered(SCHEMAS)))


def reference(name: str, answer: str, prompt: str = "<|assistant|>") -> Message:
    """Return the message as transformers reads it."""
    found = parse_response(answer, TEMPLATES[name], prefix=prompt)
    calls = [call["function"] for call in found.get("tool_calls", ())]
    thought = found.get("thinking") or found.get("reasoning_content") or ""
    return Message(
        found.get("content", ""), thought, tuple((call["name"], json.dumps(call["arguments"])) for call in calls)
    )


def plain(message: Message) -> Message:
    """Return a message with the arguments of its calls in one form."""
    return message._replace(calls=tuple((name, json.dumps(json.loads(found))) for name, found in message.calls))


@pytest.mark.parametrize(("name", "answer"), EACH)
@pytest.mark.histories
def test_an_answer_is_read_as_transformers_reads_it(name: str, answer: str):
    whole = read(start(name), [answer])
    assert plain(whole) == reference(name, answer)
    for parts in cuts(answer):
        assert read(start(name), parts) == whole, parts


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.histories
def test_random_answers_are_the_same_however_they_arrive(name: str):
    draw = random.Random(name)
    pieces = [answer[at : at + 9] for answer in ANSWERS[name] for at in range(0, len(answer), 9)]
    pieces += [*ResponseTemplate(TEMPLATES[name]).marks, "\n", " ", "<", "a"]
    compared = 0
    for _ in range(300 if THOROUGH else 120):
        text = "".join(draw.choices(pieces, k=draw.randrange(10)))
        whole = read(start(name), [text])
        assert read(start(name), list(text)) == whole, text
        try:
            expected = reference(name, text)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # transformers fails; infd makes the region content
        if name in ("json", "braces", "lines", "tags") and text.count("<") > 1:
            continue  # transformers keeps the last of several texts only
        compared += 1
        assert (whole.thought.strip(), len(whole.calls)) == (expected.thought.strip(), len(expected.calls)), text
    assert compared


def test_the_prompt_may_open_a_region():
    assert read(start("json", "hi<|assistant|>\n<think>\n"), ["a</think>b"]) == Message("b", "a")
    assert reference("json", "a</think>b", "hi<|assistant|>\n<think>\n") == Message("b", "a")
    assert read(start("json", "<think><|assistant|>"), ["b"]) == Message("b")
    template = ResponseTemplate(TEMPLATES["json"])
    thought, inside = template.thought("<|assistant|>", ""), template.thought("<|assistant|><think>", "")
    assert thought is not None
    assert inside is not None
    assert (thought.opening, thought.closing, thought.inside) == ("<think>", "</think>", False)
    assert inside.inside
    assert template.thought("<|assistant|>", "So") is None
    assert template.ends(calls=True) == ("</think>",)


def test_text_is_emitted_before_its_region_ends_and_a_call_when_it_is_complete():
    reading = start("json")
    assert reading.feed("<think>a b") == ""
    aside = reading.take()
    assert aside is not None
    assert aside.thought == "a b"
    assert reading.feed("</think>c d ") == "c d"
    assert reading.feed("e<tool_call>" + '{"name": "now", "arguments": {}}') == " e"
    assert reading.take() is None or not reading.take()
    reading.feed("</tool_call>")
    aside = reading.take()
    assert aside is not None
    assert [(call.name, call.arguments) for call in aside.calls] == [("now", "{}")]


def test_a_closing_mark_within_a_string_of_a_call_is_text():
    answer = '<tool_call>{"name": "weather", "arguments": {"city": "a</tool_call>\\"</tool_call>"}}</tool_call>b'
    called = (("weather", '{"city": "a</tool_call>\\"</tool_call>"}'),)
    for parts in ([answer], list(answer)):
        assert read(start("json"), parts) == Message("b", calls=called)
    bad = '<tool_call>{"name": "a\n</tool_call>b'  # no string of JSON, so the mark ends the region
    assert read(start("json"), [bad]) == read(start("json"), list(bad)) == Message(bad)


def test_a_region_that_is_no_call_is_content():
    for answer in ("<tool_call>{}</tool_call>", "<tool_call>[1", '<tool_call>{"name": 7}</tool_call>'):
        assert read(start("json"), [answer]) == Message(answer)
    reading = Reading(ResponseTemplate(TEMPLATES["json"]).start("", "", None))
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(reading, [call]) == Message(call)


def test_strings_of_a_call_get_the_types_that_the_tool_states():
    template = json.loads(json.dumps(TEMPLATES["tags"]))
    del template["fields"]["tool_calls"]["content_args"]["value_parser"]
    answer = "</think><tool_call><function=weather><parameter=city>7</parameter><parameter=days>7</parameter>"
    reading = Reading(ResponseTemplate(template).start("<|assistant|>", "", Offered(SCHEMAS)))
    message = read(reading, [answer, "</function></tool_call>"])
    assert message.calls == (("weather", '{"city": "7", "days": 7}'),)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, "version"),
        ({"fields": {}}, "no field"),
        ({"fields": {"a": {}, "b": {}}}, "two fields"),
        ({"fields": {"a": {"open": "x", "open_pattern": "x"}}}, "both"),
        ({"fields": {"a": {"open": ""}}}, "empty"),
        ({"fields": {"a": {"open_pattern": ".*x"}}}, "any character"),
        ({"fields": {"a": {"open_pattern": "<(?=x)"}}}, "look-arounds"),
        ({"fields": {"a": {"open_pattern": r"<(a)\1"}}}, "references"),
        ({"fields": {"a": {"open_pattern": "<(?i:x)"}}}, "flags"),
        ({"fields": {"a": {"open_pattern": "<x{9999}"}}}, "256"),
        ({"fields": {"a": {"open_pattern": "<(?:"}}}, "unterminated"),
        ({"fields": {"a": {"open_pattern": "<" + "x" * 3000}}}, "2,048"),
        ({"fields": {"a": {"open": "x", "unknown": 1}}}, "unknown"),
        ({"fields": {"a": {"open": "x", "content": "xml-inline"}}}, "tag_pattern"),
        ({"fields": {"a": {"open": "x", "content": "yaml"}}}, "yaml"),
        ({"fields": {"a": {"open": "x", "transform": "y" * 5000}}}, "4,096"),
    ],
)
def test_a_template_that_cannot_be_read_in_bounded_time_is_refused(change: dict[str, Any], reason: str):
    with pytest.raises(CheckpointError, match=reason):
        ResponseTemplate({"start_anchor": "<|assistant|>", "fields": {"content": {}}} | change)


def test_a_pattern_that_backtracks_exponentially_takes_counted_steps():
    steps = Steps(10**6)
    assert Pattern("<(?:a|a)*(?:a*)*b").search("<" + "a" * 3000, 0, steps, ended=True) is None
    assert 0 < steps.left < 10**6
    with pytest.raises(Exhausted):
        Pattern("<a{0,100}b").search("<" * 10 + "a" * 300, 0, Steps(100), ended=True)


def test_repeats_of_nothing_are_compiled_in_bounded_time():
    nothing = functools.reduce(lambda inner, _: f"(?:{inner}){{256}}", range(20), "")
    assert Pattern(f"<{nothing}a").search("<a", 0, Steps(100), ended=True) == (0, 2, {}, True)


def test_an_answer_that_exhausts_its_steps_is_content():
    template = {"start_anchor": "x", "fields": {"thinking": {"open_pattern": "<(?:.?){100}y"}, "content": {}}}
    text = "<" * 3000
    message = read(Reading(ResponseTemplate(template).start("", "", None)), [text])
    assert message == Message(text)
    long = "<tool_call>" + "a" * 70_000 + "</tool_call>b"
    assert read(start("json"), [long]) == Message(long)


PATTERNS = [
    *(r"<a>(?P<n>\w+).*?</a>", r"(?:<e>|$)", r"(?:^|<t>\s*)", r"\n?</r>", r"<(?:ab|a)b?", r"<a{1,3}?b*", r"<\ba"),
    *(r"<[^a-c\s]+>", r"<x(a|b)*c|<xa", r"<(?P<n>a*?)(?P<m>a*)>", r"^<a", r"<a\Z", r"<a\B.", r"<\D\S\W[\d_-]?"),
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_search_finds_the_match_of_a_backtracking_search_and_knows_when_it_is_final(pattern: str):
    ours, theirs, draw = Pattern(pattern), re.compile(pattern, re.DOTALL), random.Random(pattern)
    pieces = ["<", "a", "b", "c", ">", "</a>", "<a>", "<t>", " ", "\n", "</r>", "<e>", "x", "7", "_"]
    for _ in range(1000):
        text = "".join(draw.choices(pieces, k=draw.randrange(10)))
        at = draw.randrange(len(text) + 1)
        found, expected = ours.search(text, at, Steps(10**6), ended=True), theirs.search(text, at)
        assert (found is None) == (expected is None), text
        if found is not None and expected is not None:
            groups = {name: group for name, group in expected.groupdict().items() if group is not None}
            assert found == (*expected.span(), groups, True), text
        early = ours.search(text, 0, Steps(10**6), ended=False)
        for more in ("", "a", ">", "</a>", "b<e>", "\n"):
            whole = theirs.search(text + more)
            if early is not None and early.decided:
                assert whole is not None
                assert whole.span() == (early.start, early.end), (text, more)
            elif early is not None and whole is not None:
                assert whole.start() >= early.start, (text, more)


def test_auto_takes_the_response_template_if_no_table_reads_the_chat_template():
    tokenizer = wrap(byte_level())
    unknown = ChatTemplate({"default": "{{ messages }}"}, {})
    for template, taken in ((unknown, True), (ChatTemplate({"default": CHATML}, {}), False)):
        syntax = Syntax.choose(tokenizer, template, response_template=TEMPLATES["json"])
        assert isinstance(syntax.whole, ResponseTemplate) == taken
    assert Syntax.choose(tokenizer, unknown, response_template={"fields": 7}).whole is None
    assert Syntax.choose(tokenizer, unknown).whole is None
    named = Syntax.choose(
        tokenizer, ChatTemplate({"default": CHATML}, {}), tools_name="hf", response_template=TEMPLATES["json"]
    )
    assert isinstance(named.whole, ResponseTemplate)
    with pytest.raises(ConfigError, match="no response_template"):
        Syntax.choose(tokenizer, unknown, tools_name="response_template")
    check_names(reasoning_name="auto", tools_name="hf")
    thinks = ChatTemplate({"default": published()["llama.cpp/MiMo-VL"]}, {})
    assert Syntax.choose(tokenizer, thinks, response_template=TEMPLATES["json"]).tools is not None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"open": "CALL", "close_pattern": r"(?:DONE|$)"}, ""),
        ({"open_pattern": r"<call>\s*(?P<name>\w+)\s*:"}, ""),
        ({"open_pattern": r"<call>\s*(?P<name>\w+)\s*:", "repeats": False}, ""),
        ({"transform": {"function": {"name": "{content.tool}", "parameters": "{content.input}"}}}, ""),
        ({"transform_each": True, "transform": {"name": "{tool_name}", "arguments": "{parameters}"}}, ""),
        ({"content": "kv-lines"}, "not JSON"),
        ({"content_args": {"unquoted_keys": True}}, "strings or keys"),
        ({"open_pattern": r"<call>[a-f]"}, "leaves a character open"),
        ({"close_pattern": "$"}, "marks before and after"),
        ({"transform": {"name": "{content.a.b}", "arguments": "{content.c}"}}, "nested"),
        ({"transform": {"name": "fixed", "arguments": "{content}"}}, "placeholders"),
        ({"transform": {"name": "{content.n}", "arguments": "{content}"}}, "beside"),
        ({"transform": {"name": "{n}", "arguments": "{content}"}}, "none or several"),
    ],
)
def test_calls_are_forced_as_the_template_reads_them_or_refused_by_name(change: dict[str, Any], reason: str):
    field: dict[str, Any] = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}
    if "open_pattern" in change:
        del field["open"]
        change = {"transform": FUNCTION} | change
    if "close_pattern" in change:
        del field["close"]
    stated = {"start_anchor": "<|assistant|>", "fields": {"tool_calls": field | change, "content": {}}}
    template = ResponseTemplate(stated)
    syntax = Syntax(whole=template)
    assert (syntax.grammar is None) == bool(reason)
    if syntax.grammar is None:
        assert re.search(reason, syntax.unforced)
        assert "--tool-parser" in syntax.unforced
        return
    calls = (ToolSchema("weather", SCHEMA, ""), ToolSchema("now", "{}", ""))
    for required in (True, False):
        compiled = COMPILER.compile(Calls(syntax.grammar, calls, required=required), Limits())
        for arguments in ('{"city": "Zürich", "days": 2}', '{"city": "</call>", "days": 0}'):
            call = syntax.grammar.call.replace("$name", "weather").replace("$arguments", arguments)
            text = (syntax.grammar.begin + call + syntax.grammar.end).encode()
            matcher = compiled.matcher()
            assert matcher.validate(list(text)) == len(text)
            matcher.advance(list(text))
            assert matcher.accepting
            message = read(Reading(template.start("<|assistant|>", "", Offered(SCHEMAS))), [text.decode()])
            assert message == Message(calls=(("weather", json.dumps(json.loads(arguments), ensure_ascii=False)),))


@pytest.mark.parametrize("name", ["json", "list"])
def test_random_forced_calls_are_read_back(name: str):
    template, draw, found = ResponseTemplate(TEMPLATES[name]), random.Random(name), 0
    assert template.grammar is not None
    wanted = Calls(template.grammar, (ToolSchema("weather", SCHEMA, ""), ToolSchema("now", "{}", "")), required=True)
    for _ in range(10):
        matcher = COMPILER.compile(wanted, Limits()).matcher()
        tokens = walk(COMPILER, matcher, draw, 600, ends=0.2)
        if tokens[-1] not in COMPILER.vocabulary.end_ids:
            continue
        text = bytes(tokens[:-1]).decode()
        message = read(Reading(template.start("<|assistant|>", "", Offered(SCHEMAS))), [text])
        assert message.content == ""
        assert message.calls
        for called, arguments in message.calls:
            assert called in SCHEMAS
            assert called == "now" or set(json.loads(arguments)) == {"city", "days"}
        found += 1
    assert found


def test_the_reason_that_calls_cannot_be_forced_names_the_setting():
    syntax = Syntax(whole=ResponseTemplate(TEMPLATES["lines"]))
    assert syntax.grammar is None
    assert "response_template" in syntax.unforced
    assert "--tool-parser" in syntax.unforced
    assert "--tool-parser" in Syntax().unforced


def test_tokens_within_the_delimiters_are_marks():
    assert {"<|tool_call>", "<tool_call|>", '<|"|>', "<channel|>"} <= set(ResponseTemplate(TEMPLATES["braces"]).marks)
    assert {"<tool_call>", "</think>"} <= set(ResponseTemplate(TEMPLATES["tags"]).marks)
