"""Generated tasks have correct answers and valid calls, and training excludes held-out items."""

from __future__ import annotations

import json
import re
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from infd import embedded
from infd.embedded.recipe import arithmetic, strings, structured, tools
from infd.embedded.recipe.catalogue import CATALOGUE, blanks
from infd.embedded.recipe.conversation import Conversation, Expect, Pool, part
from infd.embedded.recipe.judge import contains_words, meets
from infd.embedded.recipe.slots import LISTS, belongs
from infd.text.chat import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

pytestmark = pytest.mark.exhaustive

SUBJECTS = [arithmetic, strings, structured, tools]


def drawn(subject: ModuleType, pool: Pool, count: int, seed: int = 7) -> list[Conversation]:
    rng = Random(seed)
    return [subject.draw(rng, pool) for _ in range(count)]


def until_seen(subject: ModuleType, times: int, sees: Callable[[Conversation], bool]) -> None:
    """Draw for training until a rare condition was met `count` times."""
    rng = Random(7)
    seen = drawings = 0
    while seen < times:
        assert drawings < 200_000, f"seen {seen} times only"
        seen += sees(subject.draw(rng, Pool.TRAIN))
        drawings += 1


def name(subject: ModuleType) -> str:
    return subject.__name__.rpartition(".")[2]


@pytest.fixture(scope="module")
def sample() -> Callable[[ModuleType, Pool], list[Conversation]]:
    """Conversations of each subject, enough for rare cases; drawn once."""
    return {
        (subject, pool): drawn(subject, pool, 20_000 if pool is Pool.TRAIN else 4_000)
        for subject in SUBJECTS
        for pool in Pool
    }.__getitem__


def uttered(conversation: Conversation) -> str:
    return json.dumps([conversation.messages, conversation.tools], ensure_ascii=False)


def last_calls(conversation: Conversation) -> list[dict[str, Any]]:
    return [call["function"] for call in conversation.messages[-1].get("tool_calls", [])]


@pytest.mark.parametrize("pool", Pool)
@pytest.mark.parametrize("subject", SUBJECTS, ids=name)
def test_the_same_seed_draws_the_same_conversations(subject: ModuleType, pool: Pool):
    assert drawn(subject, pool, 200) == drawn(subject, pool, 200)


@pytest.mark.parametrize("pool", Pool)
@pytest.mark.parametrize("subject", SUBJECTS, ids=name)
def test_every_drawn_answer_meets_its_conversations_expectation(sample, subject: ModuleType, pool: Pool):
    for conversation in sample((subject, pool)):
        assert conversation.expect != Expect()
        answer = conversation.messages[-1]
        assert answer["role"] == "assistant"
        assert meets(conversation.expect, answer["content"], last_calls(conversation)), conversation
        assert conversation.thinking == bool(answer.get("reasoning_content"))


@pytest.mark.parametrize("subject", SUBJECTS, ids=name)
def test_no_question_of_the_evaluation_is_asked_in_training(sample, subject: ModuleType):
    asked = {
        pool: {
            message["content"]
            for one in sample((subject, pool))
            for message in one.messages
            if message["role"] == "user"
        }
        for pool in Pool
    }
    # Greetings and thanks differ between pools by phrase only; other subjects also by names and numbers.
    assert not asked[Pool.TRAIN] & asked[Pool.HELD_OUT]


@pytest.mark.parametrize("subject", SUBJECTS, ids=name)
def test_training_never_draws_a_held_out_name(sample, subject: ModuleType):
    held = {word for of in ("people", "families", "cities") for word in part(LISTS[of], Pool.HELD_OUT)}
    trained = {word for of in LISTS for word in part(LISTS[of], Pool.TRAIN)}
    held -= {word for phrase in trained for word in re.findall(r"\w+", phrase)}
    seen = {word for one in sample((subject, Pool.TRAIN)) for word in re.findall(r"\w+", uttered(one))}
    made_up = {word for word in held if not belongs(word.lower(), Pool.HELD_OUT)}

    assert not (held - made_up) & seen


@pytest.mark.parametrize("subject", SUBJECTS, ids=name)
def test_the_template_renders_every_conversation(sample, subject: ModuleType):
    template = ChatTemplate.of_file(embedded.path().parent / "recipe" / "chat_template.jinja")
    for conversation in sample((subject, Pool.TRAIN))[:300]:
        text = template.render(conversation.messages, tools=conversation.tools or None, add_generation_prompt=False)
        assert text.count("<think>") == conversation.thinking
        assert text.endswith("<|im_end|>\n")
        answer = text.rpartition("<|im_start|>assistant\n")[2]
        written = re.findall(r"<tool_call>\n(.*)\n</tool_call>", answer)
        assert [json.loads(call) for call in written] == last_calls(conversation)


# Arithmetic, recomputed from the text


SIGNS: dict[str, Callable[[int, int], float]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "×": lambda a, b: a * b,
    "÷": lambda a, b: a / b,
}


@pytest.mark.parametrize("pool", Pool)
def test_every_equation_is_right(sample, pool: Pool):
    seen = 0
    for conversation in sample((arithmetic, pool)):
        for message in conversation.messages:
            if message["role"] != "assistant":
                continue
            text = message["content"] + " " + message.get("reasoning_content", "")
            for left, right in re.findall(r"((?:-?\d+ [+×÷-] )+\d+) = (-?\d+)", text):
                first, *rest = left.split(" ")
                value: float = int(first)
                for sign, number in zip(rest[::2], rest[1::2], strict=True):
                    value = SIGNS[sign](int(value), int(number))
                assert value == int(right), text
                seen += 1
    assert seen > 2_000


@pytest.mark.parametrize("pool", Pool)
def test_every_comparison_is_right(sample, pool: Pool):
    seen = 0
    for conversation in sample((arithmetic, pool)):
        for a, word, b in re.findall(r"(\d+) is (larger|smaller) than (\d+)", conversation.messages[-1]["content"]):
            assert (int(a) > int(b)) == (word == "larger")
            seen += int(a) != int(b)
    assert seen > 200


@pytest.mark.parametrize(
    ("phrase", "question", "answer"),
    [
        (r"What is (\d+) \+ (\d+)\?", "{0} + {1}", lambda a, b: a + b),
        (r"Subtract (\d+) from (\d+)\.", "{1} - {0}", lambda a, b: b - a),
        (r"Multiply (\d+) by (\d+)\.", "{0} × {1}", lambda a, b: a * b),
        (r"Divide (\d+) by (\d+)\.", "{0} ÷ {1}", lambda a, b: a // b),
        (r"Double (\d+)\.", "Double {0}", lambda a: 2 * a),
        (r"Halve (\d+)\.", "Half of {0}", lambda a: a // 2),
        (r"What comes before (\d+)\?", "The number before {0}", lambda a: a - 1),
    ],
)
def test_the_answer_is_about_the_question(phrase: str, question: str, answer: Callable[..., int]):
    def right(conversation: Conversation) -> bool:
        if not (found := re.fullmatch(phrase, conversation.messages[-2]["content"])):
            return False
        numbers = [int(number) for number in found.groups()]
        said = conversation.messages[-1]["content"]
        assert said in (
            f"{question.format(*numbers)} = {answer(*numbers)}.",
            f"{question.format(*numbers)} is {answer(*numbers)}.",
        )
        return True

    until_seen(arithmetic, 6, right)


def pairs(conversations: list[Conversation], sign: str) -> set[tuple[int, int]]:
    """Collect an operation's pairs of numbers from the equations that begin answers."""
    opening = re.compile(rf"(\d+) {re.escape(sign)} (\d+) = ")
    return {
        (int(found[1]), int(found[2]))
        for conversation in conversations
        for message in conversation.messages
        if message["role"] == "assistant" and (found := opening.match(message["content"]))
    }


@pytest.mark.parametrize("sign", ["+", "-", "×", "÷"])
def test_no_pair_of_the_evaluation_is_asked_in_training(sample, sign: str):
    trained = pairs(sample((arithmetic, Pool.TRAIN)), sign)
    held = pairs(sample((arithmetic, Pool.HELD_OUT)), sign)

    assert len(held) > 10
    assert not held & trained


def test_the_multiplication_table_has_no_hole(sample):
    trained = pairs(sample((arithmetic, Pool.TRAIN)), "×")

    assert {(min(pair), max(pair)) for pair in trained} == {(a, b) for b in range(13) for a in range(b + 1)}


# Tools


def conforms(value: Any, form: dict[str, Any]) -> bool:
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
    right = isinstance(value, kinds[form["type"]]) and (form["type"] == "boolean" or not isinstance(value, bool))
    return right and value in form.get("enum", [value])


@pytest.mark.parametrize("pool", Pool)
def test_every_call_is_valid_by_the_schema_of_an_offered_tool(sample, pool: Pool):
    for conversation in sample((tools, pool)):
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        assert 1 <= len(offered) == len(conversation.tools) <= 5
        for message in conversation.messages:
            for call in message.get("tool_calls", []):
                schema, arguments = offered[call["function"]["name"]], call["function"]["arguments"]
                assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
                assert all(conforms(value, schema["properties"][key]) for key, value in arguments.items()), message


@pytest.mark.parametrize("pool", Pool)
def test_arguments_are_copied_from_the_question(sample, pool: Pool):
    for conversation in sample((tools, pool)):
        question = next(message["content"] for message in reversed(conversation.messages) if message["role"] == "user")
        for call in last_calls(conversation):
            for value in call["arguments"].values():
                assert isinstance(value, bool) or str(value) in question, conversation


def test_training_offers_no_held_out_tool(sample):
    held = {tool.name for tool in CATALOGUE if tool.held_out}
    abouts = {tool.about for tool in CATALOGUE if tool.held_out}
    offered = [tool["function"] for one in sample((tools, Pool.TRAIN)) for tool in one.tools]

    assert len(held) >= 15
    assert not held & {re.sub("[A-Z]", lambda big: "_" + big[0].lower(), tool["name"]) for tool in offered}
    assert not abouts & {tool["description"] for tool in offered}


def test_the_evaluation_offers_no_trained_tool(sample):
    trained = {tool["function"]["description"] for one in sample((tools, Pool.TRAIN)) for tool in one.tools}
    held = {tool["function"]["description"] for one in sample((tools, Pool.HELD_OUT)) for tool in one.tools}

    assert not trained & held


@pytest.mark.parametrize("tool", CATALOGUE, ids=lambda tool: tool.name)
def test_a_listed_tool_is_whole(tool):
    for ask in tool.ask:
        phrase, _, implied = ask.partition(" => ")
        given = blanks(phrase) | set(json.loads(implied or "{}"))
        assert set(tool.needs) <= given <= set(tool.needs | tool.may)
    for phrase in tool.say:
        assert blanks(phrase) <= set(tool.needs | tool.gives)
    assert not set(tool.gives) & set(tool.needs | tool.may)


def test_every_kind_of_exchange_with_tools_is_drawn(sample):
    ends = [(len(last_calls(one)), one.messages[-2]["role"], one.thinking) for one in sample((tools, Pool.TRAIN))]
    for calls, before in ((1, "user"), (2, "user"), (0, "user"), (0, "tool")):
        for thinking in (False, True):
            assert ends.count((calls, before, thinking)) > 200


# Words


RULES: dict[str, Callable[..., str]] = {
    r"Write (\w+) in capitals\.": str.upper,
    r"Write (\w+) in small letters\.": str.lower,
    r"Spell (\w+)\.": "-".join,
    r"First letter of (\w+)\?": lambda word: f"The first letter of {word} is {word[0]}.",
    r"Last letter of (\w+)\?": lambda word: f"The last letter of {word} is {word[-1]}.",
    r"How many letters does (\w+) have\?": lambda word: f"{'-'.join(word)} has {len(word)} letters.",
    r"Write (\w+) backwards\.": lambda word: f"{'-'.join(word)} backwards is {'-'.join(reversed(word))}: {word[::-1]}",
    r"Say (\w+) (\d) times\.": lambda word, n: " ".join([word] * int(n)),
    r"Sort alphabetically: (.*)": lambda words: ", ".join(sorted(words.split(", "))),
    r"Add commas: (.*)": lambda words: ", ".join(words.split()),
    r"Copy this: (.*)": lambda text: text,
    r"Quote this: (.*)": lambda text: f'"{text}"',
    r"As a bullet list: ([^,]+), ([^,]+)": lambda *items: "\n".join(f"- {item}" for item in items),
    r"Give me the third word of: \S+ \S+ (\S+).*": lambda word: f"The third word is {word}.",
    r"Is the letter (\w) in (\w+)\?": lambda letter, word: (
        f"Yes, {'-'.join(word)} contains {letter}."
        if letter in word
        else f"No, {'-'.join(word)} does not contain {letter}."
    ),
}


@pytest.mark.parametrize("question", RULES)
def test_word_transformations_are_right(question: str):
    def right(conversation: Conversation) -> bool:
        asked, said = (message["content"] for message in conversation.messages[-2:])
        if not (found := re.fullmatch(question, asked)) or " and " in asked:
            return False
        assert said == RULES[question](*found.groups())
        return True

    until_seen(strings, 6, right)


# JSON


@pytest.mark.parametrize("pool", Pool)
def test_json_stands_alone_and_has_its_keys_in_the_order_asked_for(sample, pool: Pool):
    for conversation in sample((structured, pool)):
        answer = conversation.messages[-1]["content"]
        keys = list(json.loads(answer))
        assert 2 <= len(keys) <= 5
        request = " ".join(message["content"] for message in conversation.messages[:-1])
        named = r"(?s).*" + r"\b.*\b".join(map(re.escape, keys)) + r"\b.*"
        assert re.match(named, request), conversation


@pytest.mark.parametrize("pool", Pool)
def test_values_of_an_answers_json_are_booleans_or_in_the_request(sample, pool: Pool):
    for conversation in sample((structured, pool)):
        request = " ".join(message["content"] for message in conversation.messages[:-1])
        for value in json.loads(conversation.messages[-1]["content"]).values():
            for one in value if isinstance(value, list) else [value]:
                assert isinstance(one, bool) or str(one) in request, conversation


@pytest.mark.parametrize("pool", Pool)
def test_json_has_the_types_of_the_schema_in_the_prompt(sample, pool: Pool):
    seen = 0
    for conversation in sample((structured, pool)):
        request = " ".join(message["content"] for message in conversation.messages[:-1])
        if '{"type": "object"' not in request:
            continue
        schema, _ = json.JSONDecoder().raw_decode(request, request.index('{"type": "object"'))
        value = json.loads(conversation.messages[-1]["content"])
        assert list(value) == list(schema["properties"])
        for field, form in schema["properties"].items():
            if form["type"] == "array":
                assert all(conforms(item, form["items"]) for item in value[field])
            else:
                assert conforms(value[field], form)
        seen += 1
    assert seen > 500


# The judge


@pytest.mark.parametrize(
    ("answer", "words", "verdict"),
    [
        ("It is 42.", "42", True),
        ("It is -42.", "42", False),
        ("It is -42.", "-42", True),
        ("It is 42.5", "42", False),
        ("It is 142.", "42", False),
        ("Order AX-4821 is late.", "ax-4821", True),
        ("Concatenate", "cat", False),
        ("The\n  cat", "the cat", True),
    ],
)
def test_only_whole_words_count(answer: str, words: str, verdict: bool):
    assert contains_words(answer, words) == verdict


def test_a_call_counts_only_with_the_right_name_arguments_and_order():
    one, two = {"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}
    expect = Expect(calls=[one, two])

    assert meets(expect, "", [one, two])
    assert not meets(expect, "", [two, one])
    assert not meets(expect, "", [one])
    assert not meets(expect, "", [{"name": "a", "arguments": {"x": True}}, two])
    assert not meets(Expect(calls=[]), "", [one])
    assert meets(Expect(calls=[]), "hello", [])


def test_json_counts_only_if_the_answer_is_nothing_else_and_equal():
    expect = Expect(json={"a": 1, "b": ["x"]})

    assert meets(expect, ' {"b": ["x"], "a": 1}\n', [])
    assert not meets(expect, '```{"a": 1, "b": ["x"]}```', [])
    assert not meets(expect, '{"a": 1, "b": ["y"]}', [])
