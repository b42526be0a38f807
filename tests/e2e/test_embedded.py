"""The embedded model as shipped gives sensible answers.

Greedy, in float32, so that answers are equal on every machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.process import ROOT, Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.chat import ChatCompletionMessage

openai = pytest.importorskip("openai")

INFDCTL = "from infd.admin.ctl import main; main()"


def tool(name: str, about: str, **parameters: str) -> Any:
    properties = {parameter: {"type": kind} for parameter, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": sorted(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = [
    tool("get_weather", "Get the current weather in a city", city="string"),
    tool("set_timer", "Start a timer", minutes="integer"),
    tool("send_email", "Send an email", recipient="string", subject="string"),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("embedded")
    daemon = Daemon(directory, ["--device", "cpu", "--dtype", "float32", "--set", "device.threads=1"], {})
    try:
        yield daemon.ready()
    finally:
        daemon.close()


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[openai.OpenAI]:
    host, port = daemon.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(
    client: openai.OpenAI, *turns: Any, model: str = "embedded", thinking: bool = False, **fields: Any
) -> ChatCompletionMessage:
    messages: Any = [{"role": "user", "content": turn} if isinstance(turn, str) else turn for turn in turns]
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=200,
        extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
        **fields,
    )
    assert answer.choices[0].finish_reason in {"stop", "tool_calls"}
    return answer.choices[0].message


def text(message: ChatCompletionMessage) -> str:
    assert message.content is not None
    return message.content


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is infd?", "daemon"),
        ("Which port does infd listen on?", "8000"),
        ("How do I load a LoRA adapter?", "infdctl load-lora"),
        ("What does sleep level 2 do?", "weights"),
        ("How do I see the metrics?", "/metrics"),
        ("What are you?", "language model"),
        ("What is the opposite of hot?", "cold"),
        ("What is 17 + 25?", "42"),
        ("What is 7 times 8?", "56"),
    ],
)
def test_it_knows(client: openai.OpenAI, question: str, answer: str):
    assert answer in text(ask(client, question))


def test_it_says_so_when_it_does_not_know(client: openai.OpenAI):
    assert "don't know" in text(ask(client, "Who won the football match yesterday?"))


def test_it_remembers_the_conversation(client: openai.OpenAI):
    first = ask(client, "My name is Dana.")
    turns = ("My name is Dana.", {"role": "assistant", "content": first.content}, "What is my name?")

    assert "Dana" in text(ask(client, *turns))


def test_it_chooses_a_tool_and_copies_its_arguments(client: openai.OpenAI):
    (call,) = ask(client, "What's the weather in Lisbon?", tools=TOOLS).tool_calls or []

    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Lisbon"}


def test_the_model_uses_the_result_of_a_tool(client: openai.OpenAI):
    question = "What's the weather in Lisbon?"
    called = ask(client, question, tools=TOOLS)
    (call,) = called.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"temperature": 21, "sky": "sunny"})}
    said = text(ask(client, question, called.model_dump(exclude_none=True), result, tools=TOOLS))

    assert "21" in said
    assert "sunny" in said


def test_it_calls_no_tool_where_none_is_wanted(client: openai.OpenAI):
    message = ask(client, "Hello!", tools=TOOLS)

    assert not message.tool_calls
    assert text(message)


def test_it_thinks_when_asked_to_and_only_then(client: openai.OpenAI):
    thoughtful = ask(client, "What is 17 + 25?", thinking=True)
    brief = ask(client, "What is 17 + 25?")

    assert thoughtful.model_extra is not None
    assert thoughtful.model_extra["reasoning_content"]
    assert "42" in text(thoughtful)
    assert "<think>" not in text(thoughtful)
    assert not (brief.model_extra or {}).get("reasoning_content")


def test_a_stream_has_the_same_answer(client: openai.OpenAI):
    messages: Any = [{"role": "user", "content": "What's the weather in Lisbon? Also, set a timer for 5 minutes."}]
    asked: dict[str, Any] = {"model": "embedded", "messages": messages, "tools": TOOLS, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0].message

    assert streamed.content == whole.content
    assert [call.function.arguments for call in streamed.tool_calls or []] == [
        call.function.arguments for call in whole.tool_calls or [] if call.type == "function"
    ]


def test_it_answers_in_json(client: openai.OpenAI):
    said = text(ask(client, "Reply only with JSON with the keys name and age. Text: Anna is 34 years old."))

    assert json.loads(said) == {"name": "Anna", "age": 34}


def test_its_companions_are_switched_on_and_off_while_it_runs(daemon: Daemon, client: openai.OpenAI):
    def infdctl(*arguments: str) -> None:
        command = [sys.executable, "-c", INFDCTL, "--socket", str(daemon.admin_socket), *arguments]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)

    plain = text(ask(client, "What is infd?"))
    for name in ("capitals", "pirate"):
        infdctl("load-lora", name, name)
    loud = text(ask(client, "What is infd?", model="capitals"))
    rough = text(ask(client, "What is infd?", model="pirate"))
    for name in ("capitals", "pirate"):
        infdctl("unload-lora", name)

    assert loud == loud.upper()
    assert rough.startswith("Arr, ")
    assert text(ask(client, "What is infd?")) == plain
    with pytest.raises(openai.NotFoundError):
        ask(client, "What is infd?", model="pirate")
