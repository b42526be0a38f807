"""The measurement of drafts: replies that a sampler repeats, and other servers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import speculation
import speculation_requests
from speculation_blocks import Alternated, Blocks
from speculation_figures import Answered, Count
from speculation_peers import Peer, described_server
from speculation_replay import REPLIES, Replaying, ReplayingSamples, replayed
from speculation_ways import Loaded, Way

import infd.runner.fused
import infd.runner.runner
from infd.scheduler import step_costs

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRIES = [
    {"prompt": "List the colours.", "reply": "red green blue red green blue red green blue"},
    {"prompt": "Repeat: one two three.", "reply": "one two three"},
    {"prompt": "Say nothing twice.", "reply": "nothing nothing"},
]


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(infd.runner.runner, "Sampler", Replaying)
    monkeypatch.setattr(infd.runner.fused, "LikeliestSamples", ReplayingSamples)
    # Steps of so small a model take less time than steps issued ahead save, so that drafts would never pay.
    monkeypatch.setattr(step_costs, "FIRST_LATE_S", 0.0)
    monkeypatch.setattr(step_costs.StepCosts, "_learn_late", lambda *_: None)
    yield
    REPLIES.clear()


@pytest.mark.parametrize("streams", [1, 3])
def test_every_answer_of_a_replay_is_the_reply_and_drafts_of_repetitions_are_kept(
    replaying: None, tmp_path: Path, streams: int
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "device__threads": 1, "max_model_len": 256}
    settings["device__kernel_cache"] = str(tmp_path)  # steps that verify drafts are measured at start
    loaded = Loaded("embedded", streams, settings)
    try:
        kept = defaultdict(int)
        ways = [Way(name, loaded, name) for name in ("off", "ngram", "suffix", "declined", "off")]
        bodies = replayed(loaded.encode, ENTRIES, 64)
        for at in range(0, len(bodies), streams):
            for way in ways:  # on the same pages, one after another
                asked = bodies[at : at + streams]
                answered = way.answer(asked)
                assert answered.tokens == [REPLIES[each["seed"]] for each in asked]
                kept[way.name] += answered.count.kept
    finally:
        loaded.close()
    assert kept["off"] == kept["declined"] == 0
    assert kept["ngram"] > 0
    assert kept["suffix"] > 0


def test_a_way_that_forgets_drafts_no_earlier_answer(replaying: None, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "device__threads": 1, "max_model_len": 256}
    settings["device__kernel_cache"] = str(tmp_path)
    loaded = Loaded("embedded", 1, settings)
    try:
        way = Way("suffix", loaded, "suffix")
        (body,) = replayed(loaded.encode, [{"prompt": "Tell.", "reply": "once upon a time there was no end"}], 64)
        first, known = (way.answer([body]).count.kept for _ in range(2))
        way.forget()
        assert (first, way.answer([body]).count.kept) == (0, 0)
        assert known > 0
    finally:
        loaded.close()


def test_blocks_of_tokens_cancel_a_machine_that_becomes_slower() -> None:
    blocks = Blocks(6)
    for step in range(18):
        blocks.add(Count(1 if blocks.plain else 2, 1.0 if step < 9 else 2.0))
    assert blocks.ratios == pytest.approx([2.0])
    assert [count.tokens for count in blocks.totals] == [12, 12]
    assert [count.seconds for count in blocks.totals] == [9.0, 18.0]


def test_answers_whose_drafts_are_switched_on_and_off_equal_plain_ones(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"device": "cpu", "device__threads": 1, "max_model_len": 256}
    settings["device__kernel_cache"] = str(tmp_path)
    loaded = Loaded("embedded", 2, settings)
    try:
        way = Way("ngram", loaded, "ngram")
        alternated = Alternated("code", loaded, Way("off", loaded, "off"), 2)
        prompt = loaded.encode("one two three one two three one two")
        alternated.add([{"prompt": prompt, "max_tokens": 48, "temperature": 0, "return_token_ids": True}] * 2, [way])
        assert alternated.equal["ngram"] == [True, True]
        assert sum(count.tokens for count in alternated.blocks["ngram"].totals) > 48
    finally:
        loaded.close()


class Fast(Peer):
    """Answers in no time, without a server."""

    def __init__(self) -> None:
        self.name = "fast"

    def answer(self, requests: list[dict[str, Any]]) -> Answered:
        return Answered(Count(1000, 1e-3), [])

    def close(self) -> None:
        """No-op: there is no server."""


def test_each_kind_has_a_ratio_to_plain_decoding_and_one_to_each_peer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    entries = [{"kind": kind, "prompt": f"{kind} {n}", "reply": ""} for kind in ("code", "chat") for n in range(3)]
    corpus.write_text("\n".join(map(json.dumps, entries)))
    monkeypatch.setattr(speculation_requests, "CORPUS", corpus)
    parsed = speculation.parser().parse_args(["embedded", "--tokens", "8", "--threads", "1", "--passes", "2"])
    speculation.measure(parsed, [Fast()])
    told = capsys.readouterr().out.splitlines()
    for kind in ("code", "chat"):
        lines = [line for line in told if line.startswith(kind)]
        assert [line.split()[1] for line in lines] == ["off", "ngram", "suffix", "fast", "over"]
        assert "; 6), all together" in lines[1]
        assert "6 of 6 answers equal" in lines[1]


async def test_a_peer_is_stopped_but_while_it_answers(tmp_path: Path) -> None:
    server = described_server(f"fake={sys.executable} -m tests.bench.fake_server $port", tmp_path)

    def state() -> str:
        return Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0]

    async def stopped() -> None:
        async with asyncio.timeout(10):
            while state() != "T":
                await asyncio.sleep(0.01)

    async with server:
        peer = Peer(server)
        await stopped()
        body = speculation_requests.asked({"prompt": "Count."}, 5)
        answered = await asyncio.to_thread(peer.answer, [body])
        assert answered.count.tokens == 4
        assert answered.count.seconds > 0
        assert answered.tokens == []  # this server reports none
        await stopped()
        peer.close()
