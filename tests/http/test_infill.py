"""Gaps between two texts are filled by the routes that offer it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.text.infill import File, Gap, Infill
from tests.http.endpoint import serving
from tests.http.model import FAMILY, foretell, tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.http.endpoint import Endpoint

ASKED: dict[str, Any] = {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 6, "seed": 0}


def infill(*ends: str) -> Infill:
    return Infill(msgspec.structs.replace(FAMILY, ends=ends), tokenizer())


@asynccontextmanager
async def filling(*ends: str) -> AsyncIterator[Endpoint]:
    async with serving() as endpoint:
        served = endpoint.server.served
        assert served is not None
        endpoint.server.served = msgspec.structs.replace(served, infill=infill(*ends))
        yield endpoint


async def test_a_completion_fills_the_gap_between_prompt_and_suffix():
    prompt = infill().prompt(Gap("ab", "cd"))
    async with filling() as endpoint:
        answer = await endpoint.complete(prompt="ab", suffix="cd", max_tokens=6)
        assert answer["choices"][0]["text"] == foretell(prompt, 6)[1]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        ids = await endpoint.complete(prompt=tokenizer().encode("ab"), suffix="cd", max_tokens=6)
        assert ids["choices"][0]["text"] == answer["choices"][0]["text"]
        both = await endpoint.complete(prompt=["ab", "b"], suffix="cd", max_tokens=6)
        assert both["choices"][0]["text"] == answer["choices"][0]["text"]
        plain = await endpoint.complete(prompt="ab", suffix="", max_tokens=6)
        assert plain["choices"][0]["text"] == foretell(tokenizer().encode("ab"), 6)[1]


async def test_llamacpps_route_fills_a_gap_whole_and_streamed():
    files = (File("a.py", "x"),)
    prompt = infill().prompt(Gap("ab", "cd", "ef", files))
    ids, text = foretell(prompt, 6)
    async with filling() as endpoint:
        body = {**ASKED, "input_extra": [{"filename": "a.py", "text": "x"}], "prompt": "ef"}
        status, answer = await endpoint.post("/infill", body)
        assert (status, answer["content"], answer["tokens"]) == (200, text, ids)
        assert (answer["stop"], answer["stop_type"], answer["tokens_evaluated"]) == (True, "limit", len(prompt))

        async with endpoint.session.post("/infill", json={**body, "stream": True}) as response:
            blocks = (await response.text()).split("\n\n")
        assert blocks.pop() == ""
        *events, last = [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks]
        assert "".join(event["content"] for event in events) == text
        assert not any(event["stop"] for event in events)
        fields = ("stop", "stop_type", "tokens_predicted", "tokens_evaluated", "model")
        assert {name: last[name] for name in fields} == {name: answer[name] for name in fields}


async def test_the_familys_end_tokens_end_the_text():
    prompt = infill().prompt(Gap("ab", "cd"))
    ids, _ = foretell(prompt, 6)
    end = tokenizer().token(ids[3])
    assert end is not None
    assert ids[3] not in ids[:3]
    async with filling(end) as endpoint:
        _, answer = await endpoint.post("/infill", ASKED)
        assert (answer["tokens_predicted"], answer["stop_type"]) == (4, "eos")
        assert answer["content"] == foretell(prompt, 3)[1]


async def test_a_stop_string_is_named():
    prompt = infill().prompt(Gap("ab", "cd"))
    _, text = foretell(prompt, 6)
    stop = text[2:4]
    async with filling() as endpoint:
        _, answer = await endpoint.post("/infill", {**ASKED, "stop": [stop]})
        assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/completions", {"prompt": "a", "suffix": "b" * 900}, "prompt"),
        ("/v1/completions", {"prompt": [10**6], "suffix": "b"}, "prompt"),
        ("/infill", {"input_prefix": "a"}, None),
        ("/infill", {**ASKED, "n": 2}, "n"),
        ("/infill", {**ASKED, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_a_gap_that_cannot_be_filled_is_refused_by_its_field(path: str, body: dict[str, Any], param: str):
    async with filling() as endpoint:
        status, answer = await endpoint.post(path, body)
        assert (status, answer["error"]["param"]) == (400, param or answer["error"]["param"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"), ("/infill", ASKED, "input_suffix")],
)
async def test_a_model_without_the_tokens_refuses_by_name(
    endpoint: Endpoint, path: str, body: dict[str, Any], param: str
):
    served = endpoint.server.served
    assert served is not None
    endpoint.server.served = msgspec.structs.replace(served, infill=None)
    status, answer = await endpoint.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert "filling in the middle" in answer["error"]["message"]
