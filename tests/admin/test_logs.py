"""`infdctl logs`: recent and new log records over the admin socket."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from infd.admin import items
from infd.telemetry.log import Plain
from tests.admin.test_ctl import infdctl
from tests.admin.test_server import ask

if TYPE_CHECKING:
    from tests.admin.conftest import AdminEngine


def record(level: int, message: str, **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "infd.test", "levelno": level, "levelname": logging.getLevelName(level), "msg": message, **fields}
    )


async def test_the_text_is_the_line_that_the_daemon_logs(backend: AdminEngine) -> None:
    logged = record(logging.INFO, "two\nlines", ms=12.3456789, client='say "x"', stack_info="Stack:\n  here")
    backend.logs.handle(logged)
    code, out, err = await infdctl("--socket", backend.socket, "logs")

    assert (code, err) == (0, "")
    assert out == Plain().format(logged) + "\n"


async def test_the_last_records_of_a_level_as_json(backend: AdminEngine) -> None:
    for number in range(3):
        backend.logs.handle(record(logging.WARNING, f"warning {number}", number=number))
        backend.logs.handle(record(logging.INFO, "info"))
    code, out, _ = await infdctl("--socket", backend.socket, "logs", "-n", "2", "--level", "warning", "--json")
    found = [msgspec.json.decode(line, type=items.LogRecord, strict=True) for line in out.splitlines()]

    assert code == 0
    assert [(each.seq, each.message, each.fields, each.dropped) for each in found] == [
        (3, "warning 1", {"number": 1}, 0),
        (5, "warning 2", {"number": 2}, 0),
    ]


async def test_the_records_of_one_request_are_found_by_either_of_its_ids(backend: AdminEngine) -> None:
    fields = [{}, {"request_id": "mine", "ticket": "0123"}, {"request_id": "other"}, {"request_id": "mine"}]
    for number, each in enumerate(fields):
        backend.logs.handle(record(logging.INFO, f"record {number}", **each))
    runs = [
        await infdctl("--socket", backend.socket, "logs", "--request", name, "-n", lines)
        for name, lines in (("mine", "9"), ("mine", "1"), ("0123", "9"), ("x y", "9"))
    ]

    assert [[word for word in out.split() if word.isdigit()] for _, out, _ in runs] == [["1", "3"], ["3"], ["1"], []]
    assert {code for code, _, _ in runs} == {0}


async def test_a_follower_reads_new_records_until_the_daemon_ends(backend: AdminEngine) -> None:
    backend.logs.handle(record(logging.INFO, "old"))
    following = asyncio.create_task(infdctl("--socket", backend.socket, "logs", "-f", "-n", "0"))
    while not backend.admin.feeds.open:
        await asyncio.sleep(0.001)
    backend.logs.handle(record(logging.INFO, "new"))
    await backend.admin.close()
    code, out, err = await following

    assert (code, err) == (0, "")
    assert [line.split()[1:] for line in out.splitlines()] == [["INFO", "infd.test", "new"]]


async def test_lost_records_are_counted(backend: AdminEngine) -> None:
    for _ in range(2050):
        backend.logs.handle(record(logging.INFO, "many"))
    _, out, err = await infdctl("--socket", backend.socket, "logs", "--since", "1")

    assert len(out.splitlines()) == 2048
    assert "1 records before this one are forgotten" in err


async def test_an_unknown_level_is_refused(backend: AdminEngine) -> None:
    status, body = await ask(backend.socket, "GET", "/v1/logs?level=loud")

    assert (status, body["code"]) == (400, "bad_request")
    assert "last, since, level, request, follow" in body["detail"]


async def test_records_since_a_time_are_shown_without_older_ones(backend: AdminEngine) -> None:
    old = record(logging.INFO, "old")
    old.created -= 600
    backend.logs.handle(old)
    backend.logs.handle(record(logging.INFO, "new"))
    shown = {since: (await infdctl("--socket", backend.socket, "logs", "--since", since))[1] for since in ("5m", "1h")}

    assert [line.split()[-1] for line in shown["5m"].splitlines()] == ["new"]
    assert [line.split()[-1] for line in shown["1h"].splitlines()] == ["old", "new"]
    code, _, told = await infdctl("--socket", backend.socket, "logs", "--since", "5 weeks")
    assert (code, "90s, 5m, 2h or 1d" in told, "infdctl logs --help" in told) == (2, True, True)
    _, _, told = await infdctl("bench", "--compare", "a.json")
    assert "See `infdctl bench --help`" in told
