"""The unmodified `anthropic` package works with infd."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from infd.http.auth import Keys
from tests.http.endpoint import serving
from tests.http.model import MODEL
from tests.http.scripted import speaking
from tests.http.test_messages import THINK, TOOLS
from tests.http.test_tools import CALL, PARIS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.http.endpoint import Endpoint

anthropic = pytest.importorskip("anthropic")

pytestmark = pytest.mark.exhaustive

SAID: Any = {"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def client_of(endpoint: Endpoint, key: str = "k") -> AsyncIterator[Any]:
    async with anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=key, max_retries=0) as client:
        yield client


async def both(client: Any, **fields: Any) -> Any:
    """Return the message, whole and as the package folds the stream: both are equal but for ids and the cache."""
    said = {**SAID, **fields, "extra_body": {"seed": 0}}
    whole = await client.messages.create(**said)
    async with client.messages.stream(**said) as stream:
        kinds = [event.type async for event in stream]
        folded = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.to_dict() | {"id": ""} for block in folded.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]
    assert (folded.stop_reason, folded.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    return whole


async def test_thoughts_text_and_a_call():
    async with speaking(f"<think>\nhm\n</think>\n\nI look.{CALL}") as endpoint, client_of(endpoint) as client:
        message = await both(client, tools=TOOLS, **THINK | {"max_tokens": 2000})

    thought, text, call = message.content
    assert (thought.thinking, text.text, call.name, call.input) == ("hm", "I look.", "weather", json.loads(PARIS))
    assert message.stop_reason == "tool_use"


async def test_a_call_that_is_cut_off_is_folded_without_an_error():
    async with speaking(CALL[:70]) as endpoint, client_of(endpoint) as client:
        message = await both(client, tools=TOOLS)

    assert isinstance(message.content[-1].input, dict)


async def test_a_conversation_with_a_tool_goes_on():
    async with speaking(CALL) as endpoint, client_of(endpoint) as client:
        first = await client.messages.create(**SAID, tools=TOOLS, extra_body={"seed": 0})
        (call,) = first.content
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        turns = [*SAID["messages"], first.to_param(), {"role": "user", "content": [result]}]
        second = await client.messages.create(**SAID | {"messages": turns}, tools=TOOLS, extra_body={"seed": 0})
        counted = await client.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS)

    assert second.content[0].name == "weather"
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


async def test_models_and_errors():
    async with serving(keys=Keys.of("k")) as endpoint:
        async with client_of(endpoint) as client:
            assert [model.id async for model in await client.models.list(limit=1)] == [MODEL, "alias"]
            assert (await client.models.retrieve("alias")).display_name == "alias"
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.messages.create(**SAID | {"model": "claude"})
            assert missing.value.request_id
            with pytest.raises(anthropic.BadRequestError, match="messages"):
                await client.messages.create(**SAID | {"messages": []})
        async with client_of(endpoint, "other") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**SAID)
