"""litellm's client works with infd: chat as its provider for OpenAI and for vLLM, completions, Responses, messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pydantic
import pytest

from tests.e2e.test_tool_loops import QUESTION, RUN, STREAMED, TOOLS, correct

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.usefixtures("no_telemetry"),
    pytest.mark.filterwarnings("ignore"),  # of the client's libraries
]

CHAT = pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
ASKED: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def litellm(no_telemetry: None) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks GitHub
        module = pytest.importorskip("litellm", reason="`make test-all` installs it")
        # Of a model that its table lacks, litellm asks for no stream of Responses, and makes one of the whole answer.
        known = {"litellm_provider": "openai", "mode": "chat", "supports_native_streaming": True}
        module.register_model({"openai/embedded": known})
        yield module


@pytest.fixture
def given(url: str) -> dict[str, Any]:
    return {"api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 300, "max_retries": 0}


def at(provider: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request to a provider's API; litellm adds /v1/messages to Anthropic's address."""
    anthropic = {"api_base": given["api_base"].removesuffix("/v1")} if provider == "anthropic" else {}
    return {"model": f"{provider}/embedded", **given, **anthropic}


@CHAT
def test_a_stream_folds_to_the_whole_answer(litellm: ModuleType, given: dict[str, Any], provider: str):
    asked = {**at(provider, given), "messages": [{"role": "user", "content": "Hello!"}]}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True))
    folded = litellm.stream_chunk_builder(chunks, messages=asked["messages"])

    assert len(chunks) > 3
    assert whole.choices[0].message.content
    assert folded.choices[0].message.content == whole.choices[0].message.content
    assert folded.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert whole.usage.prompt_tokens > 0
    assert whole.usage.completion_tokens > 0


@STREAMED
@CHAT
def test_a_tool_loop(litellm: ModuleType, given: dict[str, Any], provider: str, stream: bool):
    messages, finishes = [*ASKED], []
    for _ in range(4):
        answer = litellm.completion(**at(provider, given), messages=messages, tools=TOOLS, stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        (choice,) = answer.choices
        finishes.append(choice.finish_reason)
        if choice.finish_reason == "stop":
            break
        messages.append(choice.message.model_dump(exclude_none=True))
        for call in choice.message.tool_calls:
            result = RUN[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    assert finishes == ["tool_calls", "stop"]
    assert correct(choice.message.content)


def test_an_answer_that_a_schema_accepts(litellm: ModuleType, given: dict[str, Any]):
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=12)
        people: int = pydantic.Field(ge=0, le=99)

    answer = litellm.completion(**at("openai", given), messages=ASKED, response_format=City)

    City.model_validate_json(answer.choices[0].message.content)


def test_completions(litellm: ModuleType, given: dict[str, Any]):
    asked = {**at("text-completion-openai", given), "prompt": "Once upon", "max_tokens": 8}
    whole = litellm.text_completion(**asked).choices[0].text
    streamed = [chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True)]

    assert whole
    assert "".join(streamed) == whole


def test_responses_streamed_or_not_and_continued(litellm: ModuleType, given: dict[str, Any]):
    fields = {name: given[name] for name in ("api_base", "api_key", "temperature")}
    asked = {"model": "openai/embedded", **fields, "max_output_tokens": 60}
    first = litellm.responses(**asked, input="Hello!")
    events = list(litellm.responses(**asked, input="Hello!", stream=True))
    second = litellm.responses(**asked, input="And you?", previous_response_id=first.id)

    assert [event.type for event in (events[0], events[-1])] == ["response.created", "response.completed"]
    assert len([event for event in events if event.type == "response.output_text.delta"]) > 3
    assert events[-1].response.output[-1].content == first.output[-1].content
    assert second.usage.input_tokens > first.usage.input_tokens


async def test_awaited(litellm: ModuleType, given: dict[str, Any]):
    asked = {**at("openai", given), "messages": ASKED, "max_tokens": 8}
    whole = await litellm.acompletion(**asked)
    parts = [chunk.choices[0].delta.content or "" async for chunk in await litellm.acompletion(**asked, stream=True)]

    assert "".join(parts) == whole.choices[0].message.content


def test_errors_have_litellms_types(litellm: ModuleType, given: dict[str, Any]):
    with pytest.raises(litellm.BadRequestError, match="messages"):
        litellm.completion(**at("openai", given), messages=[])
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(**at("openai", given) | {"model": "openai/nobody"}, messages=ASKED)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**at("openai", given), messages=[{"role": "user", "content": "a " * 9000}])
