"""`infdctl pause | resume`, as processes against a running engine."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

import msgspec

from infd.admin import protocol
from infd.engine.lifecycle.state import State
from infd.request import FinishReason
from tests.admin.test_ctl import infdctl

if TYPE_CHECKING:
    import pytest

    from tests.admin.conftest import AdminEngine


def at(backend: AdminEngine, *arguments: str) -> Any:
    return infdctl("--socket", backend.socket, *arguments)


async def test_pause_and_resume_report_their_effect(backend: AdminEngine) -> None:
    async with backend.loaded():
        code, out, err = await at(backend, "pause", "--mode", "keep", "--new", "reject", "--json")
        assert code == 0, err
        paused = msgspec.json.decode(out, type=protocol.TransitionResult, strict=True)
        assert (paused.state, paused.done, paused.frozen) == ("paused", True, 0)
        assert "frozen" in paused.reason
        assert "refused" in paused.reason
        code, out, err = await at(backend, "resume", "--wait", "--timeout", "30", "--json")
        assert code == 0, err
        assert msgspec.json.decode(out, type=protocol.TransitionResult).state == "ready"
        assert backend.engine.lifecycle.state is State.READY


async def test_a_pause_that_waits_for_a_request_goes_on_by_itself(backend: AdminEngine) -> None:
    async with backend.loaded(), backend.request() as (_, choices):
        code, out, err = await at(backend, "pause", "--json")
        assert (code, msgspec.json.decode(out, type=protocol.TransitionResult).done) == (0, False)
        assert "goes on" in err
        code, _, err = await at(backend, "pause", "--wait", "--timeout", "0")
        assert code == 5
        assert "it goes on: wait again" in err
        waiting = asyncio.create_task(at(backend, "pause", "--wait", "--json"))
        backend.executor.gate.set()
        assert [delta.finish async for _, delta in choices][-1] is FinishReason.LENGTH
        code, out, err = await waiting
        assert code == 0, err
        assert msgspec.json.decode(out, type=protocol.TransitionResult).done


async def test_a_replaced_or_impossible_verb_exits_4_and_names_the_next_command(backend: AdminEngine) -> None:
    code, _, err = await at(backend, "pause")
    assert code == 4
    assert "starting" in err
    assert "infdctl status" in err
    async with backend.loaded(), backend.request():
        waiting = asyncio.create_task(at(backend, "pause", "--wait"))
        while backend.engine.lifecycle.state is not State.PAUSED:
            await asyncio.sleep(0)
        await at(backend, "resume")
        code, _, err = await waiting
        assert code == 4
        assert "overtaken" in err


async def test_a_pause_is_logged_with_its_caller(backend: AdminEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with backend.loaded():
        await at(backend, "pause", "--mode", "abort")
        await at(backend, "resume")
        await at(backend, "pause", "--mode", "never")
    told = [record.__dict__ for record in caplog.records if record.name == "infd.admin"]
    assert [(entry["verb"], entry["result"], entry["uid"]) for entry in told] == [
        ("pause", "done", os.geteuid()),
        ("resume", "done", os.geteuid()),
    ]
    moved = [record for record in caplog.records if record.name == "infd.engine"]
    assert [record.getMessage() for record in moved] == ["the engine is paused", "the engine is ready"]
    assert moved[0].__dict__["mode"] == "abort"


async def test_the_prefix_cache_can_be_reset_with_and_without_running_requests(backend: AdminEngine) -> None:
    code, _, err = await at(backend, "reset-prefix-cache")
    assert (code, "starting" in err) == (4, True)
    async with backend.loaded(), backend.request():
        await asyncio.sleep(0)
        code, out, err = await at(backend, "reset-prefix-cache", "--json")
        assert (code, msgspec.json.decode(out)) == (0, {"pages": 0, "preempted": 0}), err
        code, out, err = await at(backend, "reset-prefix-cache", "--running", "--json")
        assert (code, msgspec.json.decode(out)) == (0, {"pages": 0, "preempted": 1}), err
        assert "1 choices computed anew" in err


async def test_every_surface_reports_the_state(backend: AdminEngine) -> None:
    async with backend.loaded():
        await at(backend, "pause")
        _, table, _ = await at(backend, "status")
        _, out, _ = await at(backend, "status", "--json")
    assert "paused (requests in flight finish first, new requests are held) since" in table
    assert msgspec.json.decode(out)["state"] == "paused"
