"""Tool calls are separated from content, however the text is cut, and no text is lost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.text.markup import Reading
from infd.text.reasoning.blocks import QWEN3
from infd.text.tools.families_json import HERMES
from infd.text.tools.offered import Offered
from infd.text.tools.scan import ObjectScan
from tests.text.transcripts import Message, cuts, read
from tests.thorough import among

if TYPE_CHECKING:
    from collections.abc import Iterable


def block(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS, ROME = ("weather", '{"city": "Paris"}'), ("weather", '{"city": "Rome"}')
ODD = r'{"a": "}</tool_call>\"\\", "b": [{"c": "é🙂"}, []], "d": {}}'

TRANSCRIPTS = {
    "nothing but text": ("Four < five.", Message("Four < five.")),
    "one call": (block(*PARIS), Message(calls=(PARIS,))),
    "two calls": (block(*PARIS) + "\n" + block(*ROME), Message(calls=(PARIS, ROME))),
    "two calls without space": (block(*PARIS) + block(*ROME), Message(calls=(PARIS, ROME))),
    "text before, between and after": (
        f"Let me see.\n{block(*PARIS)}\n and \n{block(*ROME)}\n\nDone. \n",
        Message("Let me see.\nand \nDone. \n", calls=(PARIS, ROME)),
    ),
    "space alone beside a call": (f" \n{block(*PARIS)}\n\n", Message(calls=(PARIS,))),
    "arguments of every kind": (block("f", ODD), Message(calls=(("f", ODD),))),
    "no space at all": ('<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>', Message(calls=(("f", '{"a":1}'),))),
    "an escaped name": (block(r"\u0066\"", "{}"), Message(calls=(('f"', "{}"),))),
    "a tool that is not offered": (block("nonsense", "{}"), Message(calls=(("nonsense", "{}"),))),
    # emitted once the block is closed
    "arguments first": (
        '<tool_call>\n{"arguments": {"a": [1]}, "name": "f"}\n</tool_call>.',
        Message(".", calls=(("f", '{"a": [1]}'),)),
    ),
    "no arguments": ('<tool_call>{"name": "now"}</tool_call>', Message(calls=(("now", "{}"),))),
    "null for arguments": (block("now", "null"), Message(calls=(("now", "{}"),))),
    "arguments as a text": (block("f", r'"{\"a\": 1}"'), Message(calls=(("f", '{"a": 1}'),))),
    "a member before the name": (
        '<tool_call>{"id": 7, "name": "f", "arguments": {}}</tool_call>',
        Message(calls=(("f", "{}"),)),
    ),
    "members behind the arguments": (
        '<tool_call>{"name": "f", "arguments": {}, "id": {"a": "}"}}</tool_call>x',
        Message("x", calls=(("f", "{}"),)),
    ),
    # the model forgets
    "never closed": (block(*PARIS).removesuffix("\n</tool_call>"), Message(calls=(PARIS,))),
    "never closed, and arguments first": (
        '<tool_call>{"arguments": {}, "name": "f"}',
        Message(calls=(("f", "{}"),)),
    ),
    "closed by the next one": (block(*PARIS)[:-12] + block(*ROME), Message(calls=(PARIS, ROME))),
    "text behind an object that is not closed": (block(*PARIS)[:-12] + "I did.", Message("I did.", calls=(PARIS,))),
    "cut within the arguments": (
        '<tool_call>{"name": "f", "arguments": {"a": "b\\',
        Message(calls=(("f", '{"a": "b\\'),)),
    ),
    "arguments that are never closed": (
        '<tool_call>{"name": "f", "arguments": {"a": [1\n</tool_call>' + block(*PARIS),
        Message(calls=(("f", '{"a": [1\n'), PARIS)),
    ),
    "a string that is never closed": (
        '<tool_call>{"name": "f", "arguments": {"a": "1\n</tool_call>' + block(*PARIS),
        Message(calls=(("f", '{"a": "1\n'), PARIS)),
    ),
    "a string over two lines": (block("f", '{"a": "1\n2"}'), Message(calls=(("f", '{"a": "1\n2"}'),))),
    # no calls
    "cut before the arguments": ('Hm. <tool_call>\n{"name": "f"', Message('Hm. <tool_call>\n{"name": "f"')),
    "cut within the mark": ("Hm. <tool_c", Message("Hm. <tool_c")),
    "an empty block": ("<tool_call></tool_call>", Message("<tool_call></tool_call>")),
    "no object": ("<tool_call> [1] </tool_call>", Message("<tool_call> [1] </tool_call>")),
    "an empty object": ("<tool_call>{ }</tool_call>", Message("<tool_call>{ }</tool_call>")),
    "an empty name": (block("", "{}"), Message(block("", "{}"))),
    "no JSON": ('a <tool_call>\n{"name": f}\n</tool_call> b', Message('a <tool_call>\n{"name": f}\n</tool_call> b')),
    "arguments in a list": (block("f", "[1]"), Message(block("f", "[1]"))),
    "arguments in a number": (block("f", "1"), Message(block("f", "1"))),
    "arguments in another text": (block("f", '"a"'), Message(block("f", '"a"'))),
    "a bad escape in the name": (block(r"\x", "{}"), Message(block(r"\x", "{}"))),
    "the mark as a word": ("The <tool_call> tag.", Message("The <tool_call> tag.")),
    "a call behind the mark as a word": (
        "<tool_call> <tool_call>" + block(*PARIS),
        Message("<tool_call> <tool_call>", calls=(PARIS,)),
    ),
}


def hermes(most_calls: int | None = None) -> Reading:
    return Reading(calls=HERMES.start(Offered({"weather": b""})), most_calls=most_calls)


@pytest.mark.parametrize("name", TRANSCRIPTS)
@pytest.mark.histories
def test_a_transcript_is_the_same_message_wherever_it_is_cut(name: str):
    answer, message = TRANSCRIPTS[name]
    for parts in cuts(answer):
        assert read(hermes(), parts) == message, parts


def test_arguments_stream_as_they_come():
    reading = hermes()
    returned = []
    for part in [
        "<tool_call>\n",
        '{"name": ',
        '"f", "argu',
        'ments": {',
        '"a": "',
        "b c",
        '"',
        "}",
        "}\n",
        "</tool_call>",
    ]:
        assert reading.feed(part) == ""
        aside = reading.take()
        returned.append(None if aside is None else [(call.name, call.arguments) for call in aside.calls])

    assert returned == [
        None,
        None,
        None,
        [("f", "{")],
        [(None, '"a": "')],
        [(None, "b c")],
        [(None, '"')],
        [(None, "}")],
        None,
        None,
    ]


def test_text_is_returned_at_once_unless_it_may_begin_a_call():
    reading = hermes()
    returned = [reading.feed(part) for part in ["a", " b", " ", "<", "c", " <tool", "_call>", " x", "y\n", "z"]]

    assert returned == ["a", " b", "", "", " <c", "", "", " <tool_call> x", "y", "\nz"]


@pytest.mark.histories
def test_only_the_first_call_counts_where_one_is_wanted():
    answer = f"a {block(*PARIS)} b {block(*ROME)} c {block(*ROME)}"
    for parts in cuts(answer):
        assert read(hermes(most_calls=1), parts) == Message("a b c", calls=(PARIS,))


@pytest.mark.histories
def test_nothing_in_a_thought_is_a_call():
    answer = f"<think>\n{block(*PARIS)}\n</think>\n\n{block(*ROME)}"
    for parts in cuts(answer):
        reading = Reading(QWEN3.start("", ""), HERMES.start(Offered({})))
        assert read(reading, parts) == Message("", block(*PARIS), (ROME,))


def in_parts(text: str, size: int) -> Iterable[str]:
    return (text[start : start + size] for start in range(0, len(text), size))


@pytest.mark.parametrize("size", [40, 50_000])
def test_a_megabyte_of_arguments_is_read_once(size: int):
    arguments = json.dumps({"code": 'if a < b { "\\n" }\n' * 35_000, "more": [{"<": i} for i in range(25_000)]})
    assert len(arguments) > 2**20

    message = read(hermes(), in_parts(block("f", arguments), size))

    assert message == Message(calls=(("f", arguments),))


@pytest.mark.histories
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 1000,
        "<tool_call>\n" * 1000 + "{" * 1000,
        '<tool_call>{"' * 1000,
        '<tool_call>{"name": ' + '"f' * 100_000,
        "<tool_call>" + " " * 200_000 + "{",
        '<tool_call>{"name": "f", "argument": ' + "[" * 100_000,
        "<" * 100_000,
        " \n" * 100_000,
        '<tool_call>{"a": ' + "{" * 100_000 + "</tool_call>",
    ],
    ids=lambda text: text[:24],
)
def test_hostile_text_is_content(text: str):
    for size, answer in ((1, text[: among(20_000, len(text))]), (7, text), (len(text), text)):
        assert read(hermes(), in_parts(answer, size)) == Message(answer)


def test_deep_arguments_are_passed_on_unchanged():
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000

    assert read(hermes(), in_parts(block("f", deep), 1000)) == Message(calls=(("f", deep),))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab<>{}[]"\\/\n é🙂', max_size=12) | st.just("</tool_call>"),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text('ab"<', max_size=3), children, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.histories
@settings(max_examples=among(100, 300), deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.text("fg", min_size=1, max_size=3), st.dictionaries(st.text(max_size=3), json_values, max_size=3)),
        max_size=3,
    ),
    ascii=st.booleans(),
    size=st.integers(1, 9),
)
def test_any_json_object_is_parsed_as_arguments(calls: list[tuple[str, dict[str, object]]], ascii: bool, size: int):
    written = tuple((name, json.dumps(arguments, ensure_ascii=ascii)) for name, arguments in calls)
    text = "\n".join(block(name, arguments) for name, arguments in written)

    assert read(hermes(), in_parts(text, size)) == Message(calls=written)


GARBAGE = [
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": ',
    '{"name"',
    ': "',
    "{",
    "}",
    '"',
    "\\",
    "[",
    "]",
    "\n",
    " ",
    "<",
    "é",
    "a",
]


@pytest.mark.histories
@settings(max_examples=among(150, 500), deadline=None)
@given(pieces=st.lists(st.sampled_from(GARBAGE), max_size=14), data=st.data())
def test_garbage_is_the_same_message_wherever_it_is_cut_and_no_word_is_lost(pieces: list[str], data: st.DataObject):
    text = "".join(pieces)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]

    message = read(hermes(), parts)

    assert message == read(hermes(), list(text))
    if not message.calls:
        assert message.content == text
    for word in ("é", "a"):
        returned = message.content + "".join(name + arguments for name, arguments in message.calls)
        lost = text.count(word) - returned.count(word)
        # Text between a call's arguments and the end of its object belongs to the object.
        assert lost >= 0
        assert lost == 0 or message.calls


@pytest.mark.parametrize("text", ['{"a": "}", "b": {"c": [1, {}]}} rest', '{"\\\\": "\\""}]'])
def test_an_object_ends_where_json_says(text: str):
    whole, end = json.JSONDecoder().raw_decode(text)
    for cut in range(len(text)):
        scan, read, pending = ObjectScan("</x>"), 0, ""
        for part in (text[:cut], text[cut:]):
            pending += part
            if read == 0 or scan.depth:
                count = scan.scan(pending, until=0)
                read, pending = read + count, pending[count:]
        assert read == end, whole
