from __future__ import annotations

import pytest

from infd.loadgen.load import offer
from infd.loadgen.prompts import Prompts, WordCost
from infd.loadgen.settings import Settings
from infd.loadgen.stream import RequestFailed
from tests.bench.fake_server import FakeOpenAI


async def test_every_token_of_every_request_is_counted() -> None:
    async with FakeOpenAI().serving() as server:
        report = await offer(Settings(url=server.url, requests=5, concurrency=2, output_tokens=7, warmup=0))

    assert (report.requests.completed, report.requests.failed) == (5, 0)
    assert report.tokens.output == 35
    assert report.tokens.counted == "server"
    assert report.model == "fake"
    assert server.most_running == 2


async def test_prompts_have_the_wanted_length_in_the_servers_tokens() -> None:
    async with FakeOpenAI().serving() as server:
        report = await offer(Settings(url=server.url, requests=3, input_tokens=130, output_tokens=2, warmup=0))

    assert report.tokens.input == 3 * 130


async def test_first_text_counts_and_a_role_alone_does_not() -> None:
    async with FakeOpenAI(usage=False).serving() as server:
        report = await offer(Settings(url=server.url, requests=2, output_tokens=4, warmup=0))

    assert (report.tokens.output, report.tokens.counted) == (8, "client")


async def test_completions_are_measured_alike() -> None:
    async with FakeOpenAI().serving() as server:
        settings = Settings(
            url=server.url + "/v1", endpoint="completions", requests=2, output_tokens=3, ignore_eos=True
        )
        report = await offer(settings)

    assert report.tokens.output == 6
    assert len(server.bodies) == 3  # one is the warm-up
    assert server.bodies[0]["ignore_eos"] is True
    assert report.latency_ms.inter_token is not None


async def test_failures_are_counted_by_kind() -> None:
    fates = ["refuse", "error", "cut", "vanish", "", "refuse"]
    told: list[str] = []
    async with FakeOpenAI(fail=fates.__getitem__).serving() as server:
        settings = Settings(url=server.url, requests=6, concurrency=1, output_tokens=2, warmup=0)
        report = await offer(settings, notify=told.append)

    assert report.requests.errors == {
        "http 429 queue_full": 2,
        "error event internal_error": 1,
        "truncated": 1,
        "disconnected": 1,
    }
    assert (report.requests.completed, report.requests.failed) == (1, 5)
    assert sum("first failure" in line for line in told) == 4


async def test_a_finish_reason_is_an_end_too() -> None:
    async with FakeOpenAI(fail=lambda number: "reason").serving() as server:
        report = await offer(Settings(url=server.url, requests=2, output_tokens=3, warmup=0))

    assert (report.requests.completed, report.tokens.output) == (2, 6)


async def test_a_servers_own_fields_are_in_every_body() -> None:
    async with FakeOpenAI().serving() as server:
        settings = Settings(url=server.url, requests=1, output_tokens=4, body={"min_tokens": 4, "temperature": 0.5})
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
            url=server.url, requests=8, concurrency=None, request_rate=100_000.0, output_tokens=50, warmup=0
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


def test_equal_seeds_give_equal_prompts() -> None:
    first, second = (Prompts("random", 20, 7, shared=0.5) for _ in range(2))
    other = Prompts("random", 20, 8, shared=0.5)
    taken = first.take()
    assert taken == second.take()
    assert taken != other.take()
    assert taken != first.take()


def test_shared_prompts_begin_alike_and_go_on_differently() -> None:
    supply = Prompts("shared-prefix", 20, 0, shared=0.75)
    one, two = supply.take().split(), supply.take().split()
    assert len(one) == len(two) == 20
    assert one[:15] == two[:15]
    assert one[15:] != two[15:]


def test_a_prompt_shared_as_a_whole_still_ends_in_a_word_of_its_own() -> None:
    supply = Prompts("shared-prefix", 8, 0, shared=1.0)
    assert supply.take().split()[:7] == supply.take().split()[:7]


@pytest.mark.parametrize(("overhead", "per_word"), [(0, 1), (11, 1), (5, 4.25)])
def test_two_probes_give_the_tokens_per_word(overhead: int, per_word: float) -> None:
    cost = WordCost.from_probes((round(overhead + 32 * per_word), round(overhead + 96 * per_word)))
    assert cost.overhead + cost.words(200) * cost.per_word == pytest.approx(200, abs=per_word)


def test_implausible_probes_count_a_word_as_one_token() -> None:
    assert WordCost.from_probes((40, 40)).words(128) == 128
