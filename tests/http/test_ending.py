"""The end of an answer: stop strings, end ids and limits, and the text shown for each, in chat and completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests import fakes
from tests.http.model import chat_prompt, foretell, letters, tokenizer

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

PROMPT = [5, 6, 7]
END = 2  # <|im_end|>

pytestmark = pytest.mark.parametrize("api", ["chat", "completions"])


def prompt(api: str) -> list[int]:
    return chat_prompt("hi") if api == "chat" else PROMPT


async def answer(endpoint: Endpoint, api: str, **fields: Any) -> dict[str, Any]:
    """Return the only choice of an answer, with its text as "text"."""
    body = await (endpoint.chat(**fields) if api == "chat" else endpoint.complete(prompt=PROMPT, **fields))
    (choice,) = body["choices"]
    return {**choice, "text": choice["message"]["content"] if api == "chat" else choice["text"]}


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run an endpoint whose model generates only its end id."""
    monkeypatch.setattr(fakes, "choose", lambda histories, seed: END)


@pytest.mark.usefixtures("ends_at_once")
async def test_the_models_end_id_ends_an_answer_and_is_not_shown(endpoint: Endpoint, api: str):
    choice = await answer(endpoint, api, max_tokens=5, skip_special_tokens=False)

    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", None)


@pytest.mark.usefixtures("ends_at_once")
async def test_ignore_eos_continues_after_the_end_id(endpoint: Endpoint, api: str):
    choice = await answer(endpoint, api, max_tokens=5, ignore_eos=True, return_token_ids=True)

    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("", "length", [END] * 5)


@pytest.mark.usefixtures("ends_at_once")
async def test_special_tokens_are_shown_where_asked(endpoint: Endpoint, api: str):
    choice = await answer(endpoint, api, max_tokens=2, ignore_eos=True, skip_special_tokens=False)

    assert choice["text"] == "<|im_end|>" * 2


@pytest.mark.usefixtures("ends_at_once")
async def test_an_end_id_does_not_count_before_min_tokens(endpoint: Endpoint, api: str):
    choice = await answer(endpoint, api, max_tokens=5, min_tokens=3, return_token_ids=True)

    assert (choice["finish_reason"], len(choice["token_ids"])) == ("stop", 4)


@pytest.mark.parametrize("shown", [True, False])
async def test_a_stop_string_ends_an_answer_and_is_shown_where_asked(endpoint: Endpoint, api: str, shown: bool):
    ids, _ = foretell(prompt(api), 60)
    place = letters(ids)[2]
    stop = tokenizer().decode(ids[place : place + 1])
    choice = await answer(endpoint, api, max_tokens=60, stop=stop, min_tokens=place, include_stop_str_in_output=shown)

    text = tokenizer().decode(ids[: place + 1])
    assert choice["text"] == (text if shown else text.removesuffix(stop))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


async def test_a_stop_string_does_not_count_before_min_tokens(endpoint: Endpoint, api: str):
    ids, _ = foretell(prompt(api), 60)
    stops = [tokenizer().decode(ids[place : place + 1]) for place in letters(ids)[:2]]
    choice = await answer(endpoint, api, max_tokens=60, stop=stops, min_tokens=60, return_token_ids=True)

    assert (choice["finish_reason"], choice["token_ids"]) == ("length", ids)


@pytest.mark.parametrize("shown", [True, False])
async def test_a_stop_id_ends_an_answer_and_is_shown_where_asked(endpoint: Endpoint, api: str, shown: bool):
    ids, _ = foretell(prompt(api), 30)
    place = letters(ids)[0]
    choice = await answer(
        endpoint,
        api,
        max_tokens=30,
        stop_token_ids=[ids[place]],
        include_stop_str_in_output=shown,
        return_token_ids=True,
    )

    assert choice["text"] == tokenizer().decode(ids[: place + 1] if shown else ids[:place])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ids[place])
    assert choice["token_ids"] == ids[: place + 1]
