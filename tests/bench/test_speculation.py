"""The measurement of drafts: replies that a sampler repeats, and other servers."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import speculation
from speculation import Peer, Replaying, Way, described_server, replayed

import infd.runner.runner
import infd.scheduler.speculation

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
    # Steps of so small a model take less time than steps issued ahead save, so that drafts would never pay.
    monkeypatch.setattr(infd.scheduler.speculation, "AHEAD_S", 0.0)
    yield
    Replaying.replies.clear()


@pytest.mark.parametrize("streams", [1, 3])
def test_every_answer_of_a_replay_is_the_reply_and_drafts_of_repetitions_are_kept(
    replaying: None, tmp_path: Path, streams: int
) -> None:
    settings: dict[str, Any] = {"device": "cpu", "device__threads": 1, "max_model_len": 256}
    settings["device__kernel_cache"] = str(tmp_path)  # steps that verify drafts are measured at start
    kept = {}
    for name in ("off", "ngram", "suffix"):
        way = Way(name, "embedded", name, streams, settings)
        try:
            bodies = replayed(way.encode, ENTRIES, 64)
            for at in range(0, len(bodies), streams):
                asked = bodies[at : at + streams]
                answered = way.answer(asked)
                assert answered.tokens == [Replaying.replies[each["seed"]] for each in asked]
                kept[name] = kept.get(name, 0) + answered.count.kept
        finally:
            way.close()
    assert kept["off"] == 0
    assert kept["ngram"] > 0
    assert kept["suffix"] > 0


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
        body = speculation.asked({"prompt": "Count."}, 5)
        answered = await asyncio.to_thread(peer.answer, [body])
        assert answered.count.tokens == 4
        assert answered.count.seconds > 0
        assert answered.tokens == []  # this server reports none
        await stopped()
        peer.close()
