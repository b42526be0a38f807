from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

from infd.loadgen.datasets.call import DatasetError
from infd.loadgen.datasets.spec import File, Synthetic
from infd.loadgen.load import Silent, connect, offer
from infd.loadgen.prompts import WordCost
from infd.loadgen.settings import Settings
from infd.loadgen.stream import RequestFailed
from tests.bench.fake_server import FakeOpenAI
from tests.http.endpoint import serving


class Listener(Silent):
    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, text: str) -> None:
        self.told.append(text)


async def test_every_token_of_every_request_is_counted() -> None:
    async with FakeOpenAI().serving() as server:
        report = await offer(
            Settings(url=server.url, requests=5, concurrency=2, dataset=Synthetic(output_tokens=7), warmup=0)
        )

    assert (report.requests.completed, report.requests.failed) == (5, 0)
    assert report.tokens.output == 35
    assert report.tokens.counted == "server"
    assert report.model == "fake"
    assert server.most_running == 2


async def test_prompts_have_the_wanted_length_in_the_servers_tokens() -> None:
    async with FakeOpenAI().serving() as server:
        report = await offer(
            Settings(url=server.url, requests=3, dataset=Synthetic(input_tokens=130, output_tokens=2), warmup=0)
        )

    assert report.tokens.input == 3 * 130


async def test_first_text_counts_and_a_role_alone_does_not() -> None:
    async with FakeOpenAI(usage=False).serving() as server:
        report = await offer(Settings(url=server.url, requests=2, dataset=Synthetic(output_tokens=4), warmup=0))

    assert (report.tokens.output, report.tokens.counted) == (8, "client")


async def test_completions_are_measured_alike() -> None:
    async with FakeOpenAI().serving() as server:
        settings = Settings(
            url=server.url + "/v1",
            endpoint="completions",
            requests=2,
            dataset=Synthetic(output_tokens=3),
            body={"ignore_eos": True},
        )
        report = await offer(settings)

    assert report.tokens.output == 6
    assert len(server.bodies) == 3  # one is the warm-up
    assert server.bodies[0]["ignore_eos"] is True
    assert report.latency_ms.inter_token is not None


async def test_failures_are_counted_by_kind() -> None:
    fates = ["refuse", "error", "cut", "vanish", "", "refuse"]
    observer = Listener()
    async with FakeOpenAI(fail=fates.__getitem__).serving() as server:
        settings = Settings(url=server.url, requests=6, concurrency=1, dataset=Synthetic(output_tokens=2), warmup=0)
        report = await offer(settings, observer=observer)

    assert report.requests.errors == {
        "http 429 queue_full": 2,
        "error event internal_error": 1,
        "truncated": 1,
        "disconnected": 1,
    }
    assert (report.requests.completed, report.requests.failed) == (1, 5)
    assert sum("first failure" in line for line in observer.told) == 4


async def test_a_finish_reason_is_an_end_too() -> None:
    async with FakeOpenAI(fail=lambda number: "reason").serving() as server:
        report = await offer(Settings(url=server.url, requests=2, dataset=Synthetic(output_tokens=3), warmup=0))

    assert (report.requests.completed, report.tokens.output) == (2, 6)


async def test_a_servers_own_fields_are_in_every_body() -> None:
    async with FakeOpenAI().serving() as server:
        settings = Settings(
            url=server.url, requests=1, dataset=Synthetic(output_tokens=4), body={"min_tokens": 4, "temperature": 0.5}
        )
        await offer(settings)

    assert [(body["min_tokens"], body["temperature"]) for body in server.bodies] == [(4, 0.5)] * 2


async def test_a_key_travels_in_the_header_and_not_in_the_report() -> None:
    async with FakeOpenAI().serving() as server:
        report = await offer(Settings(url=server.url, requests=1, warmup=0), api_key="s3cret")

    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(report)


async def test_poisson_arrivals_are_not_held_back_by_slow_answers() -> None:
    async with FakeOpenAI().serving() as server:
        settings = Settings(
            url=server.url,
            requests=8,
            concurrency=None,
            request_rate=100_000.0,
            dataset=Synthetic(output_tokens=50),
            warmup=0,
        )
        report = await offer(settings)

    assert report.requests.completed == 8
    assert server.most_running == 8


async def test_a_missing_server_is_reported() -> None:
    async with FakeOpenAI().serving() as server:
        pass
    with pytest.raises(RequestFailed) as failure:
        await offer(Settings(url=server.url))
    assert failure.value.kind == "unreachable"


async def test_a_missing_route_is_reported() -> None:
    async with FakeOpenAI().serving() as server:
        with pytest.raises(RequestFailed, match="http 404"):
            await offer(Settings(url=server.url + "/elsewhere"))


@pytest.mark.parametrize(("overhead", "per_word"), [(0, 1), (11, 1), (5, 4.25)])
def test_two_probes_give_the_tokens_per_word(overhead: int, per_word: float) -> None:
    cost = WordCost.from_probes((round(overhead + 32 * per_word), round(overhead + 96 * per_word)))
    assert cost.overhead + cost.words(200) * cost.per_word == pytest.approx(200, abs=per_word)


def test_implausible_probes_count_a_word_as_one_token() -> None:
    assert WordCost.from_probes((40, 40)).words(128) == 128


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


async def test_with_a_tokenizer_completions_get_ids_and_chats_get_counted_texts() -> None:
    async with FakeOpenAI(tokenize=letters).serving() as server:
        short = Synthetic(input_tokens=61, output_tokens=1)
        ids = await offer(Settings(url=server.url, endpoint="completions", requests=3, dataset=short, warmup=0))
        texts = await offer(Settings(url=server.url, requests=3, dataset=short, warmup=0))

    assert [len(body["prompt"]) for body in server.bodies[:3]] == [61] * 3
    assert (ids.lengths, ids.inexact, ids.tokens.input) == ("ids", 0, 183)
    assert (texts.lengths, texts.inexact, texts.tokens.input) == ("tokenize", 0, 183)


async def test_a_conversations_answer_is_as_long_as_its_recorded_reply(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"conversations": [{"value": "Hi?"}, {"value": "Hello."}]}]))
    for tokenize, wanted in ((letters, 6), (None, 1)):  # without a tokenizer a token has four characters
        async with FakeOpenAI(tokenize=tokenize).serving() as server:
            dataset = File(path=str(path), shape="sharegpt")
            await offer(Settings(url=server.url, requests=1, dataset=dataset, warmup=0))

        assert [(body["messages"][0]["content"], body["max_tokens"]) for body in server.bodies] == [("Hi?", wanted)]


async def test_a_batchs_lines_go_to_their_endpoints_with_the_runs_model(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    body = {"model": "gpt", "prompt": "Once", "max_tokens": 3, "seed": 5}
    path.write_text(json.dumps({"url": "/v1/completions", "body": body}))
    async with FakeOpenAI().serving() as server:
        dataset = File(path=str(path), shape="batch")
        report = await offer(Settings(url=server.url, requests=2, dataset=dataset, warmup=1, body={"temperature": 0.5}))

    assert report.tokens.output == 6
    sent = body | {"model": "fake", "temperature": 0.5, "stream": True, "stream_options": {"include_usage": True}}
    assert server.bodies[1:] == [sent, sent]
    assert report.sampling == {"temperature": 0.5}


async def test_adapters_share_the_requests_by_weight_or_in_turns() -> None:
    async with FakeOpenAI().serving() as server:
        one = Synthetic(output_tokens=1)
        mixed = Settings(url=server.url, requests=60, models={"a": 3.0, "b": 1.0}, dataset=one, warmup=0)
        report = await offer(mixed)
        sent = Counter(body["model"] for body in server.bodies)
        turns = Settings(url=server.url, requests=4, models={"a": 1, "b": 1}, assignment="round-robin", warmup=0)
        in_turns = await offer(turns)

    assert {name: one.completed for name, one in report.models.items()} == sent
    assert sent["a"] > 1.5 * sent["b"] > 0
    assert {name: one.completed for name, one in in_turns.models.items()} == {"a": 2, "b": 2}


async def test_acceptance_is_computed_from_the_servers_counters() -> None:
    def scrape(drafts: int, drafted: int, accepted: tuple[int, int]) -> str:
        places = "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}\n'
            for place, count in enumerate(accepted)
        )
        return (
            f"# HELP x\nvllm:spec_decode_num_drafts_total {drafts}.0\n{places}"
            f"vllm:spec_decode_num_draft_tokens_total {drafted}\n"
            f"vllm:spec_decode_num_accepted_tokens_total {sum(accepted)}\n"
        )

    async with FakeOpenAI(metrics=[scrape(5, 10, (4, 1)), scrape(15, 30, (12, 6))]).serving() as server:
        report = await offer(Settings(url=server.url, requests=1, warmup=0))

    drafts = report.drafts
    assert drafts is not None
    assert (drafts.drafts, drafts.drafted_tokens, drafts.accepted_tokens) == (10, 20, 13)
    assert (drafts.acceptance, drafts.step_tokens) == (0.65, 2.3)
    assert drafts.by_position == [0.8, 0.5]


async def test_answers_that_had_to_fit_a_schema_are_judged() -> None:
    schema = {"type": "object", "required": ["a"]}
    fates = ["", "reason", "", ""]  # the second is cut by its length
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    reports = []
    for text in ('{"a": 1}', '{"b": 1}', "{"):
        async with FakeOpenAI(text=text, fail=fates.__getitem__).serving() as server:
            one = Synthetic(output_tokens=1)
            reports.append(await offer(Settings(url=server.url, requests=3, dataset=one, warmup=0, body=form)))

    assert [(report.structured.valid, report.structured.invalid) for report in reports if report.structured] == [
        (2, 0),
        (0, 2),
        (0, 2),
    ]
    assert [report.structured.cut for report in reports if report.structured] == [1, 1, 1]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"structured_outputs": {"json": "{bad"}}, "structured_outputs.json: not JSON"),
        ({"structured_outputs": {"json": {"type": "text"}}}, r"a request's schema is not valid: \$.type: 'text'"),
    ],
)
async def test_a_schema_that_judges_no_answer_is_refused_before_the_run(body: dict[str, Any], told: str) -> None:
    async with FakeOpenAI().serving() as server:
        with pytest.raises(DatasetError, match=told):
            await offer(Settings(url=server.url, requests=1, warmup=0, body=body))


async def test_an_answer_that_cannot_be_judged_fails_alone() -> None:
    fates = ["odd", ""]
    body = {"response_format": {"type": "json_object"}}
    async with FakeOpenAI(text="1", fail=fates.__getitem__).serving() as server:
        one = Synthetic(output_tokens=1)
        report = await offer(Settings(url=server.url, requests=2, dataset=one, warmup=0, body=body, concurrency=1))

    assert (report.requests.completed, report.requests.errors) == (1, {"malformed event": 1})


async def test_an_interrupted_run_reports_the_requests_that_have_ended() -> None:
    fates = ["", "", "hang", "hang"]
    async with FakeOpenAI(fail=fates.__getitem__).serving() as server:
        settings = Settings(url=server.url, requests=50, concurrency=2, warmup=0)
        run = asyncio.create_task(offer(settings, keep_on_cancel=True))
        await server.hanging.wait()
        while server.running < 2:
            await asyncio.sleep(0)
        run.cancel()
        report = await run

    assert report.interrupted
    assert (report.requests.completed, report.requests.unfinished) == (2, 2)


async def test_a_request_that_the_limit_holds_back_counts_from_its_due_time() -> None:
    async with FakeOpenAI().serving() as server:
        settings = Settings(url=server.url, requests=3, concurrency=1, request_rate=1e6, warmup=0)
        first, second, _ = (await offer(settings)).samples

    assert second.due_s + second.queued_s >= first.due_s + first.e2e_s
    assert second.ttft_s > second.queued_s


async def test_cancelling_ends_a_run_unless_its_measurements_are_wanted() -> None:
    async with FakeOpenAI(fail=lambda number: "hang").serving() as server:
        run = asyncio.create_task(offer(Settings(url=server.url, requests=1, warmup=0)))
        await server.hanging.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run


async def test_a_server_that_starts_late_is_waited_for(unused_tcp_port: int) -> None:
    settings = Settings(url=f"http://127.0.0.1:{unused_tcp_port}", requests=1, warmup=0)

    async def measured() -> int:
        async with connect(settings, patience_s=30) as generator:
            return (await generator.offer(settings)).requests.completed

    waiting = asyncio.create_task(measured())
    await asyncio.sleep(0)
    async with FakeOpenAI().serving(unused_tcp_port):
        assert await waiting == 1


@pytest.mark.parametrize("task", ["embed", "classify", "rerank"])
async def test_requests_that_pool_are_measured_whole(task: Any):
    async with serving() as endpoint:
        report = await offer(
            Settings(url=endpoint.url, task=task, inputs=3, requests=4, dataset=Synthetic(input_tokens=20))
        )

        assert (report.requests.completed, report.requests.failed, report.tokens.output) == (4, 0, 0)
        assert report.tokens.input == 4 * 3 * 20 * (2 if task == "rerank" else 1)
        assert report.latency_ms.e2e is not None
        assert report.latency_ms.inter_token is None
