"""Thoughts are separated from content, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.text.markup import Reading
from infd.text.reasoning.blocks import QWEN3
from tests.text.transcripts import Message, cuts, read

ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
OPENED = ASKED + "<think>\n"
CLOSED = ASKED + "<think>\n\n</think>\n\n"

TRANSCRIPTS = {
    "thinks first": (ASKED, "<think>\nTwo and two.\n</think>\n\nFour.", Message("Four.", "Two and two.")),
    "does not think": (ASKED, "Four < five.", Message("Four < five.")),
    "space before the mark": (ASKED, " \n<think>a</think>b", Message("b", "a")),
    "space before the answer": (ASKED, " \n <thin air>", Message(" \n <thin air>")),
    "thinks nothing": (ASKED, "<think>\n\n</think>\n\nFour.", Message("Four.")),
    "thinks nothing and says nothing": (ASKED, "<think></think>", Message()),
    "the prompt begins the thought": (
        OPENED,
        "Two\n\nand two.\n</think>\n\nFour.",
        Message("Four.", "Two\n\nand two."),
    ),
    "and it is empty": (OPENED, "\n</think>\n\nFour.", Message("Four.")),
    "a second block is content": (ASKED, "<think>a</think>b<think>c</think>", Message("b<think>c</think>", "a")),
    "no answer to thought": (ASKED, "<think>\na < b </thin </think>\n", Message("", "a < b </thin ")),
    "a mark within a word": (ASKED, "Say <think>.", Message("Say <think>.")),
    "cut within the thought": (ASKED, "<think>\nTwo and\n", Message("", "Two and")),
    "cut within the closing mark": (ASKED, "<think>\nTwo and\n</thi", Message("", "Two and\n</thi")),
    "cut within the opening mark": (ASKED, "<thi", Message("<thi")),
    "cut at once": (OPENED, "", Message()),
    "closes a thought that it has not opened": (ASKED, "</think>\n\nFour.", Message("Four.")),
    "characters beyond ASCII": (ASKED, "<think>\né🙂\n</think>\n\n你好", Message("你好", "é🙂")),
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
@pytest.mark.histories
def test_a_transcript_is_the_same_message_wherever_it_is_cut(name: str):
    prompt, answer, message = TRANSCRIPTS[name]
    for parts in cuts(answer):
        assert read(Reading(QWEN3.start(prompt, "")), parts) == message, parts


def test_where_the_prompt_closes_the_thought_there_is_nothing_to_read():
    assert QWEN3.start(CLOSED, "") is None


@pytest.mark.parametrize(
    ("continued", "answer", "message"),
    [
        ("<think>\nTwo", " and two.\n</think>\n\nFour.", Message("Four.", " and two.")),
        ("<think>a</think> Fo", "ur", None),
        ("Fo", "ur <think>", None),
        (" ", "<think>a</think>b", Message("b", "a")),
    ],
)
def test_an_answer_that_goes_on_may_go_on_thinking(continued: str, answer: str, message: Message | None):
    thoughts = QWEN3.start(ASKED + continued, continued)

    assert (thoughts is None) == (message is None)
    if message is not None:
        assert read(Reading(thoughts), list(answer)) == message


@pytest.mark.histories
def test_a_call_at_the_beginning_of_a_line_ends_a_thought_left_open():
    def message(text: str) -> Message:
        whole = read(Reading(QWEN3.start(OPENED, "", ["<tool_call>", "<call>"])), [text])
        for parts in cuts(text):
            assert read(Reading(QWEN3.start(OPENED, "", ["<tool_call>", "<call>"])), parts) == whole
        return whole

    assert message("Hm.\n<tool_call>{}") == Message("<tool_call>{}", "Hm.")
    assert message("<call>\n<tool_call>") == Message("<call>\n<tool_call>")
    assert message("a <call> b\n\n<call>") == Message("<call>", "a <call> b")
    assert message("a <call> b</think>c") == Message("c", "a <call> b")
    assert message("a</think>\n<call>") == Message("<call>", "a")
    assert message("a\n<tool_c") == Message("", "a\n<tool_c")


def test_a_thought_streams_as_it_comes():
    reading = Reading(QWEN3.start(ASKED, ""))
    returned = []
    for part in ["<think>", "\n", "Two", "\n", " and", "</", "b>", "\n</think>", "\n\n", "Four", "."]:
        content = reading.feed(part)
        aside = reading.take()
        returned.append(content or (aside.thought if aside is not None else ""))

    assert returned == ["", "", "Two", "", "\n and", "", "</b>", "", "", "Four", "."]


def test_the_tokens_of_a_thought_are_counted_with_its_marks():
    def count(prompt: str, tokens: list[str]) -> int:
        reading = Reading(QWEN3.start(prompt, ""))
        for token in tokens:
            reading.feed(token)
            reading.count()
        aside = reading.take()
        return 0 if aside is None else aside.thought_tokens

    assert count(ASKED, ["<think>", "\n", "hm", "\n", "</think>", "\n\n", "yes"]) == 5
    assert count(OPENED, ["hm", "</", "think>", "\n\n", "yes"]) == 3
    assert count(OPENED, ["hm"]) == 1
    assert count(ASKED, ["yes", " ", "no"]) == 0


def test_endless_space_is_neither_held_back_nor_slow():
    reading = Reading(QWEN3.start(ASKED, ""))

    assert len("".join(reading.feed("\n") for _ in range(100_000))) >= 99_000
    reading = Reading(QWEN3.start(OPENED, ""))
    for _ in range(100_000):
        reading.feed("\n")
    reading.feed("a\n" * 100_000)
    aside = reading.take()
    assert aside is not None
    assert len(aside.thought) == 199_999


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "/", "\n", " ", "a", "é"]), max_size=12),
    begun=st.booleans(),
    data=st.data(),
)
def test_nothing_is_lost_but_marks_and_the_newlines_beside_them(pieces: list[str], begun: bool, data: st.DataObject):
    text = "".join(pieces)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]

    message = read(Reading(QWEN3.start(OPENED if begun else ASKED, "")), parts)

    assert message == read(Reading(QWEN3.start(OPENED if begun else ASKED, "")), list(text))
    returned = message.thought + message.content
    kept = text if begun else text.replace("<think>", "", text.lstrip().startswith("<think>"))
    opened = begun or text.lstrip().startswith(("<think>", "</think>"))
    kept = kept.replace("</think>", "", opened)
    assert returned.replace("\n", "").lstrip() == kept.replace("\n", "").lstrip()
