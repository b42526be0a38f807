"""`infdctl sleep | wake | load-weights`, as processes against a running engine."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from infd.admin import protocol
from infd.admin.commands import AdminContext, status
from infd.admin.ctl import show
from infd.engine.lifecycle.state import State
from infd.errors import CheckpointError
from tests.admin.settings import fixed
from tests.admin.test_ctl import infdctl
from tests.admin.test_pause import at

if TYPE_CHECKING:
    import pytest

    from tests.admin.conftest import AdminEngine


def moved(out: str) -> protocol.TransitionResult:
    return msgspec.json.decode(out, type=protocol.TransitionResult, strict=True)


async def test_sleep_and_staged_wake_report_their_effect(backend: AdminEngine) -> None:
    async with backend.loaded():
        code, out, err = await at(backend, "sleep", "--level", "2", "--wait", "--json")
        assert code == 0, err
        asleep = moved(out)
        assert (asleep.state, asleep.done, asleep.freed_bytes) == ("sleeping", True, 2000)
        assert (asleep.weights, asleep.kv_cache) == ("released", "released")
        assert "level 2" in asleep.reason
        _, table, _ = await at(backend, "status")
        assert "weights   released" in table
        code, out, err = await at(backend, "wake", "--tags", "weights", "--json")
        assert (code, moved(out).state, moved(out).weights) == (0, "sleeping", "loaded"), err
        code, out, err = await at(backend, "wake", "--tags", "kv_cache", "--timeout", "30", "--wait", "--json")
        assert (code, moved(out).state, moved(out).kv_cache) == (0, "ready", "loaded"), err


async def test_status_reports_the_memory_that_stays_on_the_gpu_during_sleep(
    backend: AdminEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    context = AdminContext(backend.engine, "embedded", backend.drained.set, fixed())
    async with backend.loaded():
        for resident, told in (
            ({}, False),
            ({"graphs": 3 * 2**20, "context_and_others": 500 * 2**20}, True),
        ):
            backend.executor.resident = resident
            show.status(await status(context, protocol.NoArguments()))
            assert ("stays     3 MiB graphs, 500 MiB context and others" in capsys.readouterr().out) == told


async def test_status_lists_captured_steps(
    backend: AdminEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = AdminContext(backend.engine, "embedded", backend.drained.set, fixed())
    async with backend.loaded():
        facts = backend.executor.describe()
        for graphs, told in (
            ({}, None),
            (
                {"captured": [1, 2, 8], "with_adapters": [], "to_come": 4, "capture_s": 1.26},
                "captured  steps of 3 sizes in 1.3 s, 4 to come\n",
            ),
            (
                {"captured": [1, 2, 8], "with_adapters": [8], "to_come": 0, "failed": [16, 24], "capture_s": 0.5},
                "captured  steps of 3 sizes, 1 with adapters in 0.5 s, 0 to come, 2 could not be\n",
            ),
        ):
            described = {**facts, "graphs": graphs} if graphs else facts
            monkeypatch.setattr(backend.executor, "describe", lambda described=described: described)
            show.status(await status(context, protocol.NoArguments()))
            said = capsys.readouterr().out
            assert "captured" not in said if told is None else told in said


async def test_a_wake_that_fails_exits_1_with_the_reason(backend: AdminEngine) -> None:
    async with backend.loaded():
        await at(backend, "sleep", "--level", "2", "--wait")
        backend.executor.wake_error = CheckpointError("/model/model.safetensors: No such file")
        code, _, err = await at(backend, "wake", "--wait")
        assert (code, "No such file" in err) == (1, True)
        backend.executor.wake_error = None
        code, _, err = await at(backend, "resume", "--wait")
        assert code == 0, err
        assert backend.engine.lifecycle.state is State.READY


async def test_weights_are_loaded_at_rest(backend: AdminEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infd.admin")
    async with backend.loaded():
        code, _, err = await at(backend, "load-weights", "/other", "--wait")
        assert (code, "infdctl pause --wait" in err) == (4, True)
        await at(backend, "pause", "--wait")
        code, out, err = await at(backend, "load-weights", "/other", "--wait", "--json")
        assert (code, moved(out).weights, moved(out).state) == (0, "loaded", "paused"), err
        backend.executor.weights_error, backend.executor.fails_midway = CheckpointError("became shorter"), True
        code, _, err = await at(backend, "load-weights", "/other", "--wait")
        assert (code, "became shorter" in err) == (1, True)
        code, _, err = await at(backend, "resume", "--wait")
        assert (code, "infdctl load-weights" in err) == (4, True)
    told = [record.__dict__ for record in caplog.records if record.name == "infd.admin"]
    assert [(entry["verb"], entry["result"]) for entry in told] == [
        ("load-weights", "wrong_state"),
        ("pause", "done"),
        ("load-weights", "done"),
        ("load-weights", "checkpoint"),
        ("resume", "weights_invalid"),
    ]


async def test_an_impossible_request_is_a_usage_error(backend: AdminEngine) -> None:
    runs = await asyncio.gather(
        infdctl("--socket", backend.socket, "sleep", "--level", "3"),
        infdctl("--socket", backend.socket, "wake", "--tags", "weights,soul"),
        infdctl("--socket", backend.socket, "load-weights"),
    )
    assert [code for code, _, _ in runs] == [2, 2, 2]
    assert "soul" in runs[1][2]


async def test_a_device_that_keeps_its_memory_reports_it(backend: AdminEngine) -> None:
    async with backend.loaded():
        backend.executor.sleep_refusal = "memory of cuda:0 is not given back yet"
        code, _, err = await at(backend, "sleep")
        assert (code, "cuda:0" in err, "infdctl pause" in err) == (1, True, True)


async def test_status_reports_bytes_in_huge_pages_and_whether_more_will_follow(
    backend: AdminEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = AdminContext(backend.engine, "embedded", backend.drained.set, fixed())
    async with backend.loaded():
        facts = backend.executor.describe()
        for pages, told in (
            ({"bytes": 2**30, "of": 3 * 2**29, "ended": False}, "1,024 of 1,536 MiB of the weights; others are moved"),
            (
                {"bytes": 3 * 2**29, "of": 3 * 2**29, "ended": True},
                "1,536 of 1,536 MiB of the weights, no more to come",
            ),
        ):
            described = {**facts, "large_pages": pages}
            monkeypatch.setattr(backend.executor, "describe", lambda described=described: described)
            show.status(await status(context, protocol.NoArguments()))
            assert told in capsys.readouterr().out
        assert (await status(context, protocol.NoArguments())).large_pages == protocol.LargePages(
            3 * 2**29, 3 * 2**29, True
        )
