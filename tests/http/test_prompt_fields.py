"""Fields and routes about prompts: prompt_logprobs, echo, truncate_prompt_tokens, bad_words, render, tokenize."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from infd.config import Config, LimitsConfig
from infd.http.formats.base import ENTRY_BYTES, readable
from infd.http.outputs import SHORT_LOGPROBS
from infd.http.prompt import bad_word_ids
from infd.http.schema.logprobs import PromptLogprob
from infd.offload import Offload
from infd.text.chat import ChatTemplate
from tests.fakes import FakeExecutor, capacity, continuation, likeliness, prompt_likelihoods
from tests.http.endpoint import serving
from tests.http.model import MODEL, chat_prompt, foretell, served, tokenizer
from tests.text import vocabularies

if TYPE_CHECKING:
    from tests.http.endpoint import Endpoint

PROMPT = [300, 301, 302, 303, 304]
TEXT = tokenizer().decode(PROMPT)
LONG = [300 + i % 90 for i in range(150)]  # more tokens than one step computes


def encoded_logprobs(prompt: list[int], most: int) -> list[dict[str, Any] | None]:
    """Return the expected prompt_logprobs of the fake model."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, each in zip(prompt[1:], prompt_likelihoods(prompt, most), strict=True):
        entry = {token_id: (each.chosen, each.rank)}
        for rank, (top_id, logprob) in enumerate(zip(each.top_ids, each.top, strict=True), 1):
            entry.setdefault(top_id, (logprob, rank))
        told.append(
            {
                str(i): {
                    "logprob": logprob,
                    "rank": rank,
                    "decoded_token": tokenizer().piece(i).decode("utf-8", "replace"),
                }
                for i, (logprob, rank) in entry.items()
            }
        )
    return told


@pytest.mark.parametrize("prompt", [PROMPT, LONG, [300]])
async def test_a_prompt_is_scored_token_by_token(endpoint: Endpoint, prompt: list[int]):
    body = await endpoint.complete(prompt=prompt, prompt_logprobs=2, max_tokens=3, n=2)

    for choice in body["choices"]:
        assert choice["prompt_logprobs"] == encoded_logprobs(prompt, 2)
        assert choice["text"] == foretell(prompt, 3, seed=choice["index"])[1]


LIMITED = Config(limits=LimitsConfig(prompt_logprobs_bytes=128 * 5 * 12))


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"prompt_logprobs": 1, "n": 7}, "prompt_logprobs"),
        ({"prompt_logprobs": 12}, "prompt_logprobs"),
        ({"prompt": [PROMPT, [*PROMPT, 300]], "prompt_logprobs": 2, "n": 2}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 2, "n": 5}, "logprobs"),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 2, "n": 2}, "logprobs"),
    ],
)
async def test_a_request_whose_prompt_logprobs_exceed_the_limit_is_refused(asked: dict[str, Any], param: str):
    async with serving(LIMITED) as endpoint:
        status, body = await endpoint.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, **asked})
        assert endpoint.executor.device.steps == endpoint.engine.core.in_flight.accepted == 0

    assert (status, body["error"]["param"]) == (400, param)
    assert "limits.prompt_logprobs_bytes" in body["error"]["message"]
    assert f"lower {'n or ' if 'n' in asked else ''}{param}," in body["error"]["message"]


@pytest.mark.parametrize(
    "asked",
    [
        {"prompt_logprobs": 1, "n": 6},
        {"prompt_logprobs": 11},
        {"prompt_logprobs": 5, "n": 2, "best_of": 9},
        {"echo": True, "logprobs": 2, "n": 4},
        {"echo": True, "n": 9},
        {"logprobs": 9, "n": 9},
    ],
)
async def test_prompt_logprobs_within_the_limit_are_returned(asked: dict[str, Any]):
    async with serving(LIMITED) as endpoint:
        body = await endpoint.complete(prompt=PROMPT, max_tokens=2, **asked)

    assert len(body["choices"]) == asked.get("n", 1)


async def test_a_chat_counts_its_prompt_logprobs_once_for_any_n():
    prompt = chat_prompt("hi")
    config = Config(limits=LimitsConfig(prompt_logprobs_bytes=128 * len(prompt) * 3))
    async with serving(config) as endpoint:
        body = await endpoint.chat(prompt_logprobs=2, max_tokens=2, n=5)
        said = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 3, "stream": True}
        status, refused = await endpoint.post("/v1/chat/completions", said)

    assert body["prompt_logprobs"] == encoded_logprobs(prompt, 2)
    assert (status, refused["error"]["param"]) == (400, "prompt_logprobs")


@pytest.mark.parametrize("text", ["a" * 47, "\u00e9" * 23, "\\" * 23])
def test_an_entry_is_no_longer_than_it_is_counted(text: str):
    logprob = struct.unpack("f", struct.pack("f", -1.4e-45))[0]  # a float32 with the most digits
    entry = PromptLogprob(logprob=logprob, rank=9_999_999, decoded_token=text)

    assert len(msgspec.json.encode([{9_999_999: entry}])) - len("[{}],") + len(",") <= ENTRY_BYTES


async def test_a_prompts_logprobs_are_encoded_once_and_shared_by_every_choice(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
):
    read: list[int] = []
    piece = tokenizer().piece
    monkeypatch.setattr(type(tokenizer()), "piece", lambda self, token_id: read.append(token_id) or piece(token_id))
    said = {"prompt": [PROMPT, LONG], "seed": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 2}
    looked = []
    for n in (1, 3):
        for post in (endpoint.post, endpoint.events):
            read.clear()
            await post("/v1/completions", {**said, "n": n})
            looked.append(len(read))

    assert looked[2] - looked[0] == looked[3] - looked[1] == 2 * 2 * 2 * 2, (
        "two prompts, two choices more, of two tokens"
    )


async def test_a_cached_prompt_is_scored_too(endpoint: Endpoint):
    await endpoint.complete(prompt=LONG, max_tokens=1)
    body = await endpoint.complete(prompt=LONG, prompt_logprobs=0, max_tokens=1)
    again = await endpoint.complete(prompt=LONG, max_tokens=1)

    assert body["choices"][0]["prompt_logprobs"] == encoded_logprobs(LONG, 0)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("count", [61, 65, 130])
async def test_a_cached_prompt_is_scored_for_all_its_choices_whatever_a_score_costs(count: int):
    prompt = [300 + i % 90 for i in range(count)]
    room = capacity(pages=512, rows=16, step_tokens=64, max_model_len=256, score_cost=3)
    async with serving(executor=FakeExecutor(room)) as endpoint:
        await endpoint.complete(prompt=prompt, max_tokens=1)
        body = await endpoint.complete(prompt=[prompt, PROMPT], prompt_logprobs=2, max_tokens=3, n=2)
        echo = await endpoint.complete(prompt=prompt, echo=True, logprobs=1, max_tokens=3, n=1, best_of=3)
        said = {"prompt": prompt, "seed": 0, "prompt_logprobs": 2, "max_tokens": 3, "n": 2}
        events = await endpoint.events("/v1/completions", said)
        # Chats with a common beginning: the second chat's prefix is cached.
        chat = [{"role": "user", "content": "a" * count}]
        for _ in range(2):
            _, whole = await endpoint.post(
                "/v1/chat/completions", {"messages": chat, "prompt_logprobs": 1, "max_tokens": 2, "n": 3}
            )

    of = [prompt, prompt, PROMPT, PROMPT]
    assert [choice["prompt_logprobs"] for choice in body["choices"]] == [encoded_logprobs(each, 2) for each in of]
    told = [choice for event in events for choice in event["choices"] if "prompt_logprobs" in choice]
    assert [choice["prompt_logprobs"] for choice in told] == [encoded_logprobs(prompt, 2)] * 2
    (choice,) = echo["choices"]
    assert choice["logprobs"]["token_logprobs"][:count] == [None, *(each.chosen for each in prompt_likelihoods(prompt))]
    assert whole["prompt_logprobs"] == encoded_logprobs(chat_prompt("a" * count), 1)


@pytest.mark.parametrize("count", [16, 17, 40])
async def test_logprobs_of_many_tokens_equal_those_of_each_token(endpoint: Endpoint, count: int):
    said = {"seed": 0, "max_tokens": count, "n": 2}
    completion = {"prompt": PROMPT, "logprobs": 2, **said}
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2, **said}
    whole = await endpoint.complete(**completion)
    conversation = await endpoint.chat(**chat)

    pieces = [c for event in await endpoint.events("/v1/completions", completion) for c in event["choices"]]
    for choice in whole["choices"]:
        for name, values in choice["logprobs"].items():
            parts = [piece["logprobs"][name] for piece in pieces if piece["index"] == choice["index"]]
            assert [value for part in parts for value in part] == values
            assert len(values) == count
    pieces = [c for event in await endpoint.events("/v1/chat/completions", chat) for c in event["choices"]]
    for choice in conversation["choices"]:
        told = [
            piece["logprobs"]["content"] for piece in pieces if piece["index"] == choice["index"] if piece["logprobs"]
        ]
        assert [each for part in told for each in part] == choice["logprobs"]["content"]
        assert len(choice["logprobs"]["content"]) == count


async def test_a_chat_returns_its_prompt_logprobs_once(endpoint: Endpoint):
    prompt = chat_prompt("hi")
    body = await endpoint.chat(prompt_logprobs=1, max_tokens=2, n=2)
    said = {"messages": [{"role": "user", "content": "hi"}], "seed": 0, "prompt_logprobs": 1, "max_tokens": 2, "n": 2}
    events = await endpoint.events("/v1/chat/completions", said)

    assert body["prompt_logprobs"] == encoded_logprobs(prompt, 1)
    assert [event["prompt_logprobs"] for event in events if "prompt_logprobs" in event] == [encoded_logprobs(prompt, 1)]


async def test_prompt_logprobs_come_only_on_request(endpoint: Endpoint):
    body = await endpoint.complete(prompt=PROMPT, echo=True, logprobs=1, max_tokens=2)

    assert "prompt_logprobs" not in body["choices"][0]


@pytest.mark.parametrize("prompt", [PROMPT, TEXT])
async def test_an_echo_is_the_prompt_and_then_the_answer(endpoint: Endpoint, prompt: Any):
    ids, text = foretell(PROMPT, 4)
    body = await endpoint.complete(prompt=prompt, echo=True, max_tokens=4, logprobs=2, return_token_ids=True)

    (choice,) = body["choices"]
    assert choice["text"] == TEXT + text
    assert choice["token_ids"] == PROMPT + ids
    assert body["usage"]["completion_tokens"] == 4
    logprobs = choice["logprobs"]
    pieces = [readable(tokenizer().piece(i)) for i in PROMPT + ids]
    assert logprobs["tokens"] == pieces
    assert logprobs["text_offset"] == [sum(map(len, pieces[:i])) for i in range(len(pieces))]
    scores = prompt_likelihoods(PROMPT, 2)
    assert logprobs["token_logprobs"] == [None, *(each.chosen for each in scores), *map(likeliness, ids)]
    assert logprobs["top_logprobs"][0] is None
    assert [entry[piece] for entry, piece in zip(logprobs["top_logprobs"][1:5], pieces[1:5], strict=True)] == [
        each.chosen for each in scores
    ]


async def test_a_text_is_echoed_as_it_was_sent(endpoint: Endpoint):
    text = "a <|im_end|> b\u00e9"
    body = await endpoint.complete(prompt=text, echo=True, max_tokens=1)

    assert body["choices"][0]["text"].startswith(text)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"logprobs": 1, "n": 3}, {"prompt_logprobs": 2, "n": 2}])
async def test_an_echo_streamed_and_joined_is_the_echo_gathered(endpoint: Endpoint, fields: dict[str, Any]):
    said = {"prompt": [PROMPT, LONG], "seed": 0, "echo": True, "max_tokens": 6, **fields}
    _, whole = await endpoint.post("/v1/completions", said)
    events = await endpoint.events("/v1/completions", said)

    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    for choice in whole["choices"]:
        pieces = parts[choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert [piece["prompt_logprobs"] for piece in pieces if "prompt_logprobs" in piece] == (
            [choice["prompt_logprobs"]] if "prompt_logprobs" in choice else []
        )
        for name, values in (choice["logprobs"] or {}).items():
            assert [value for piece in pieces for value in piece["logprobs"][name]] == values


@pytest.mark.parametrize("prompt", [PROMPT, LONG, [300]])
async def test_without_tokens_to_generate_a_prompt_is_only_looked_at(endpoint: Endpoint, prompt: list[int]):
    body = await endpoint.complete(prompt=prompt, echo=True, logprobs=0, max_tokens=0)

    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (tokenizer().decode(prompt), "length")
    assert choice["logprobs"]["token_logprobs"] == [None, *(each.chosen for each in prompt_likelihoods(prompt))]
    assert body["usage"]["completion_tokens"] == 0


async def test_an_echo_without_generation_runs_no_step(endpoint: Endpoint):
    body = await endpoint.complete(prompt=[TEXT, "abc"], echo=True, max_tokens=0)
    events = await endpoint.events("/v1/completions", {"prompt": PROMPT, "echo": True, "max_tokens": 0})

    assert [choice["text"] for choice in body["choices"]] == [TEXT, "abc"]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == TEXT
    assert endpoint.executor.device.steps == 0
    assert body["usage"]["total_tokens"] == len(PROMPT) + len(tokenizer().encode("abc"))


async def test_long_explanations_are_written_off_the_loop(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch):
    threads = 0

    class Counting(Offload):
        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal threads
            threads += 1
            return await super().__call__(*args, **kwargs)

    monkeypatch.setattr(endpoint.server.service, "offload", counting := Counting())
    assert len(LONG) > SHORT_LOGPROBS
    whole = await endpoint.complete(prompt=LONG, prompt_logprobs=1, max_tokens=2)
    events = await endpoint.events("/v1/completions", {"prompt": LONG, "prompt_logprobs": 1, "max_tokens": 2})
    await endpoint.complete(prompt=PROMPT, prompt_logprobs=1, max_tokens=2)
    counting.close()

    assert threads == 2
    assert events[0]["choices"][0]["prompt_logprobs"] == whole["choices"][0]["prompt_logprobs"]


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"), [(3, 4, 3), (99, 4, 99), (-1, 20, 236), (-1, 1, 255), (-1, None, 240)]
)
async def test_only_the_end_of_a_prompt_is_read_where_asked(
    endpoint: Endpoint, keep: int, max_tokens: int | None, kept: int
):
    prompt = [300 + i % 77 for i in range(300)]
    said = {} if max_tokens is None else {"max_tokens": max_tokens}
    body = await endpoint.complete(prompt=prompt, truncate_prompt_tokens=keep, return_token_ids=True, **said)

    (choice,) = body["choices"]
    assert choice["prompt_token_ids"] == prompt[-kept:]
    assert body["usage"]["prompt_tokens"] == kept
    assert choice["text"] == foretell(prompt[-kept:], max_tokens or 16)[1]


async def test_texts_and_chats_are_cut_too_however_long(endpoint: Endpoint):
    text = "ab" * 5000
    ids = tokenizer().encode(text)[-7:]
    completion = await endpoint.complete(prompt=text, truncate_prompt_tokens=7, echo=True, max_tokens=1)
    chat = await endpoint.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": text}],
            "truncate_prompt_tokens": -1,
            "return_token_ids": True,
            "max_tokens": 6,
        },
    )

    assert completion["choices"][0]["text"].startswith(tokenizer().decode(ids))
    assert completion["usage"]["prompt_tokens"] == 7
    assert chat[1]["prompt_token_ids"] == chat_prompt(text)[-250:]


async def test_a_prompt_short_enough_is_left_whole(endpoint: Endpoint):
    body = await endpoint.complete(prompt=PROMPT, truncate_prompt_tokens=5, return_token_ids=True)

    assert body["choices"][0]["prompt_token_ids"] == PROMPT


async def test_the_prompt_of_a_chat_can_be_seen_without_an_answer(endpoint: Endpoint):
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "return_token_ids": True}
    status, shown = await endpoint.post("/v1/chat/completions/render", said)
    _, answered = await endpoint.post("/v1/chat/completions", said)

    assert status == 200
    assert shown == {
        "model": MODEL,
        "prompt": tokenizer().decode(chat_prompt("hi"), skip_special_tokens=False),
        "token_ids": answered["prompt_token_ids"],
        "count": len(answered["prompt_token_ids"]),
        "max_model_len": 256,
    }


async def test_the_prompts_of_a_completion_can_be_seen_without_an_answer(endpoint: Endpoint):
    _, texts = await endpoint.post("/v1/completions/render", {"prompt": ["abc", "a<|im_end|>"]})
    _, ids = await endpoint.post("/v1/completions/render", {"prompt": [*PROMPT, 2], "truncate_prompt_tokens": 3})

    assert [(each["prompt"], each["token_ids"]) for each in texts] == [
        (text, tokenizer().encode(text)) for text in ("abc", "a<|im_end|>")
    ]
    assert [(each["prompt"], each["token_ids"]) for each in ids] == [
        (tokenizer().decode(PROMPT[-2:]) + "<|im_end|>", [*PROMPT[-2:], 2])
    ]
    assert endpoint.executor.device.steps == 0


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 1}])
async def test_the_best_of_several_answers_are_those_likeliest_on_average(endpoint: Endpoint, fields: dict[str, Any]):
    answers = [continuation(PROMPT, 6, seed=seed) for seed in range(5)]
    best = sorted(answers, key=lambda answer: sum(map(likeliness, answer)), reverse=True)
    body = await endpoint.complete(prompt=PROMPT, max_tokens=6, n=2, best_of=5, return_token_ids=True, **fields)

    echo = PROMPT if "echo" in fields else []
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert [choice["token_ids"] for choice in body["choices"]] == [echo + answer for answer in best[:2]]
    assert all((choice["logprobs"] is not None) == ("logprobs" in fields) for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 30


@pytest.fixture
async def offload():
    offload = Offload()
    yield offload
    offload.close()


async def test_a_bad_word_is_spelled_as_it_begins_a_text_and_as_it_stands_within_one(offload: Offload):
    merging = msgspec.structs.replace(served(256), tokenizer=vocabularies.wrap(vocabularies.byte_level()))

    def ids(*texts: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(merging.tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    assert await bad_word_ids([], merging, offload) == ()
    assert await bad_word_ids(["answer", " the"], merging, offload) == ids("answer", " answer", "the", " the")
    assert await bad_word_ids(["quick", "quick"], merging, offload) == ids("quick")  # the space is a token


async def test_many_bad_words_are_spelled_off_the_loop_with_the_same_result(offload: Offload):
    words = [f"w{i}" for i in range(200)]
    few = [await bad_word_ids([word], served(256), offload) for word in words]

    assert await bad_word_ids(words, served(256), offload) == tuple(spelled for each in few for spelled in each)


@pytest.mark.parametrize("skip", [True, False])
async def test_spaces_between_special_tokens_are_nothing_to_byte_level_tokenizers(endpoint: Endpoint, skip: bool):
    said = {"prompt": PROMPT, "skip_special_tokens": skip, "max_tokens": 8}
    bodies = [await endpoint.complete(**said, spaces_between_special_tokens=spaces) for spaces in (True, False)]

    assert bodies[0]["choices"] == bodies[1]["choices"]


async def test_spaces_between_special_tokens_cannot_be_switched_off_for_unknown_decoders(endpoint: Endpoint):
    endpoint.server.served = msgspec.structs.replace(served(256), tokenizer=vocabularies.wrap(vocabularies.wordpiece()))
    status, body = await endpoint.post(
        "/v1/completions", {"prompt": [5], "spaces_between_special_tokens": False, "skip_special_tokens": False}
    )

    assert (status, body["error"]["param"]) == (400, "spaces_between_special_tokens")


async def test_an_echo_aborted_before_it_was_scored_has_null_scores(endpoint: Endpoint):
    endpoint.executor.gate.clear()
    said = {"prompt": PROMPT, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    asking = asyncio.create_task(endpoint.post("/v1/completions", said))
    while not (rows := endpoint.engine.requests()):
        await asyncio.sleep(0)
    while not endpoint.engine.abort(rows[0].id) or endpoint.engine.requests()[0].state != "done":
        await asyncio.sleep(0)
    endpoint.executor.gate.set()
    status, body = await asking

    (choice,) = body["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, TEXT, "abort")
    assert choice["logprobs"]["token_logprobs"] == choice["prompt_logprobs"] == [None] * len(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_aborted_while_they_wait_for_their_prompts_scores_have_none(stream: bool):
    prompt = [300 + i % 90 for i in range(61)]
    room = capacity(pages=512, rows=16, step_tokens=64, max_model_len=256, score_cost=3)
    async with serving(executor=FakeExecutor(room)) as endpoint:
        await endpoint.complete(prompt=prompt, max_tokens=1)
        steps = endpoint.executor.device.steps
        endpoint.executor.fault = lambda plan: endpoint.executor.gate.clear()  # after the first step of three
        said = {"prompt": prompt, "prompt_logprobs": 1, "echo": True, "logprobs": 1, "n": 3}
        post = endpoint.events if stream else endpoint.post
        asking = asyncio.create_task(post("/v1/completions", said))
        while endpoint.executor.device.steps == steps:
            await asyncio.sleep(0)
        endpoint.engine.abort(endpoint.engine.requests()[0].id)
        endpoint.executor.gate.set()
        answer = await asking

    choices = [choice for event in answer for choice in event["choices"]] if stream else answer[1]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        assert (choice["text"], choice["finish_reason"]) == (tokenizer().decode(prompt), "abort")
        assert choice["logprobs"]["token_logprobs"] == choice["prompt_logprobs"] == [None] * len(prompt)


@pytest.mark.parametrize("continues", [False, True])
async def test_a_chats_echo_is_the_assistants_last_message(endpoint: Endpoint, continues: bool):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    fields = {"messages": messages, "seed": 0, "max_tokens": 4, "n": 2, "continue_final_message": continues}
    plain = await endpoint.chat(**fields)
    echoed = await endpoint.chat(**fields, echo=True)
    said = [choice["message"]["content"] for choice in echoed["choices"]]
    assert said == ["Well," + choice["message"]["content"] for choice in plain["choices"]]

    streamed = ["", ""]
    for event in await endpoint.events("/v1/chat/completions", {**fields, "echo": True}):
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["delta"].get("content") or ""
    assert streamed == said


async def test_a_chats_echo_repeats_no_message_of_another(endpoint: Endpoint):
    assert (await endpoint.chat(max_tokens=3, echo=True))["choices"] == (await endpoint.chat(max_tokens=3))["choices"]


async def test_verbosity_is_a_variable_of_templates_that_read_it(endpoint: Endpoint):
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    render = "/v1/chat/completions/render"
    status, refused = await endpoint.post(render, {**body, "verbosity": "low"})
    assert (status, refused["error"]["param"]) == (400, "verbosity")
    assert (await endpoint.post(render, {**body, "verbosity": "medium"}))[0] == 200
    assert (await endpoint.post(render, {**body, "verbosity": "chatty"}))[0] == 400
    status, refused = await endpoint.post("/v1/responses", {"input": "hi", "text": {"verbosity": "high"}})
    assert (status, refused["error"]["param"]) == (400, "text.verbosity")

    template = ChatTemplate({"default": "{{ messages[0].content }} ({{ verbosity | default('none') }})"})
    endpoint.server.served = msgspec.structs.replace(served(256), template=template)
    for value in ("low", "medium", "high"):
        assert (await endpoint.post(render, {**body, "verbosity": value}))[1]["prompt"] == f"hi ({value})"
    assert (await endpoint.post(render, body))[1]["prompt"] == "hi (none)"
    status, response = await endpoint.post(
        "/v1/responses", {"input": "hi", "text": {"verbosity": "high"}, "max_output_tokens": 1}
    )
    assert (status, response["text"]["verbosity"]) == (200, "high")
