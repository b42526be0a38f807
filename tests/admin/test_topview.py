"""What the view of `infdctl top` shows, and what keys do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infd.admin.ctl.terminal import decode
from infd.admin.ctl.topview import Action, View, duration
from infd.admin.items import Frame, Process
from infd.admin.protocol import LoraRow, RequestRow, Status
from infd.telemetry.window import Recent, Spread

if TYPE_CHECKING:
    from rich.text import Text

ID = "0123456789abcdef01234567"


def plain_text(lines: list[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def row(number: int = 0, **fields: object) -> RequestRow:
    values = {"id": f"{number:02}{ID[2:]}", "state": "running", "client": "", "priority": 0, "choices": 1}
    tokens = {"prompt_tokens": 10 + number, "cached_tokens": 0, "generated_tokens": 5, "age_s": 100.0 - number}
    return RequestRow(**(values | tokens | fields))  # type: ignore[arg-type]


def frame(*rows: RequestRow, state: str = "ready", **fields: object) -> Frame:
    counts = {"running": 12, "waiting": 3, "waiting_tokens": 4096, "rows": 64, "preemptions": 7, "steps": 1}
    pages = {"pages": 1000, "pages_referenced": 250, "pages_cached": 300, "prefix_queries": 200, "prefix_hits": 50}
    limits = {"max_model_len": 2048, "step_tokens": 2048, "accepted": 1, "terminal": {}, "last_step_age_s": None}
    drafts = {"drafts": 100, "accepted_drafts": (50, 25), "device": "cpu", "dtype": "bfloat16"}
    named = {"version": "1.2.3", "pid": 4321, "model": "tiny", "state": state, "reason": "", "since": 1000.0}
    recent = Recent(
        window_s=30.0,
        rate_s=5.0,
        prompt_tokens_s=5678.0,
        generated_tokens_s=1234.5,
        computed_tokens_s=6000.0,
        ended_s=3.2,
        steps_s=81.0,
        preemptions=2,
        tokens_a_step=31.2,
        hit_rate=0.5,
        drafts_kept=0.4,
        step=Spread(0.0123, 0.0201, 405),
        ttft=Spread(0.150, 12.5, 96),
        inter_token=Spread(0.00042, 0.0025, 37_000),
        loop_lag=Spread(0.0001, 0.0021, 500),
    )
    values = {
        "seq": 1,
        "time": 1185.0,
        "dropped": 0,
        "uptime_s": 7500.0,
        "status": Status(**(named | counts | pages | limits | drafts)),  # type: ignore[arg-type]
        "recent": recent,
        "process": Process(812 * 2**20, 34, 1024, 12),
        "oldest_waiting_s": 1.25,
        "rejected": {"rate_limit_exceeded": 3, "overloaded": 1},
        "loras": [LoraRow("pirate", "ready", "/p", "tiny", 8, 1024, 1, 4)],
        "requests": list(rows),
        "requests_total": len(rows),
    }
    return Frame(**(values | fields))  # type: ignore[arg-type]


def showing(*rows: RequestRow, **fields: object) -> View:
    view = View()
    view.show(frame(*rows, **fields))  # type: ignore[arg-type]
    return view


FACTS = (
    "tiny  ready 3m 05s  up 2h 05m  cpu bfloat16  pid 4321  infd 1.2.3",
    "requests    12 running  3 waiting (4,096 tokens, oldest 1.2s)  3.2/s end",
    "tokens/s    1,234.5 generated  5,678.0 prompt  6,000.0 computed",
    "step        p50 12.3 ms  p99 20.1 ms  81.0/s",
    "batch       12 of 64 sequences  31.2 tokens a step",
    "first token p50 150 ms  p99 12.5 s  of 96 in 30 s",
    "token gap   p50 0.42 ms  p99 2.50 ms  of 37,000 in 30 s",
    "cache pages 250 used (25%)  300 cached  450 free",
    "prefix hits 50% in 30 s  25% since start",
    "preempted   2 in 30 s  7 since start",
    "process     812 MiB  34 of 1,024 fds  12 connections",
    "loop lag    p50 0.10 ms  p99 2.10 ms",
    "rejected    rate_limit_exceeded 3  overloaded 1",
    "adapters    pirate 4",
    "drafts      1.40 tokens a step  1.75 since start",
)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_every_figure_is_shown_and_nothing_exceeds_the_terminal(width: int, height: int) -> None:
    lines = plain_text(showing(*(row(number) for number in range(90))).draw(width, height))

    assert [fact for fact in FACTS if not any(fact in line for line in lines)] == []
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert lines[-1].startswith("q quit  h help")
    assert sum(line[2:8] == ID[2:8] for line in lines) == {80: 6, 200: 38}[width]
    assert f"{ {80: 6, 200: 38}[width] } of 90 requests" in lines


def test_a_narrow_terminal_shows_fewer_columns_and_a_wide_one_all() -> None:
    view = showing(row(client="alice", adapter="pirate"))
    narrow, wide = (next(line for line in plain_text(view.draw(width)) if line.startswith("ID")) for width in (80, 200))

    assert narrow.split() == ["ID", "STATE", "CLIENT", "ADAPTER", "PROMPT", "CACHED", "GENERATED", "AGE"], (
        "without keys no column has the mark of the order"
    )
    assert set(wide.split()) - set(narrow.split()) == {"TENANT", "PRIO", "CHOICES"}
    assert ID[2:] in plain_text(showing(row()).draw(80))[-1], "empty columns go before an id is cut"


def test_tenants_that_keys_share_are_shown_before_whole_ids() -> None:
    def head(*rows: RequestRow) -> list[str]:
        return next(line for line in plain_text(showing(*rows).draw(80)) if line.startswith("ID")).split()

    assert "TENANT" in head(row(1, client="ann", tenant="team"), row(2, client="bob", tenant="team"))
    assert "TENANT" not in head(row(1, client="ann", tenant="ann"), row(2, client="bob", tenant="bob"))


def test_keys_sort_by_each_column_and_reverse() -> None:
    view = showing(row(1, client="b"), row(2, client="a"), row(3, client="c", generated_tokens=9))
    orders = {}
    for _ in range(11):
        view.press("s")
        head = next(line for line in plain_text(view.draw(200, 40)) if "STATE" in line)
        orders[head.split("v")[0].split("^")[0].split()[-1]] = [each.id[:2] for each in view.rows]

    assert orders["ID"] == ["01", "02", "03"]
    assert orders["CLIENT"] == ["02", "01", "03"]
    assert orders["PROMPT"] == ["03", "02", "01"]
    assert orders["GENERATED"][0] == "03"
    assert orders["AGE"] == ["01", "02", "03"], "the oldest first"
    view.press("r")
    assert [each.id[:2] for each in view.rows] == ["03", "02", "01"]
    view.press("S")
    assert view.rows[-1].id[:2] == "03"


def test_an_abort_names_the_selected_request_and_needs_a_yes() -> None:
    view = showing(row(1), row(2))
    assert view.press("a") is None
    assert "select a request" in view.note
    for key in decode(b"jj"):
        view.press(key)
    assert view.press("a") is None
    assert plain_text(view.draw(80, 24))[-1] == f"abort 02{ID[2:]}? y: yes, any other key: no"
    assert view.press("n") is None
    assert view.press("y") is None
    view.press("a")
    assert view.press("y") == Action("abort", f"02{ID[2:]}")
    view.show(frame(row(1)))
    assert view.press("a") is None
    assert view.note.endswith("has ended")


def test_the_daemon_is_paused_and_resumed_after_a_yes() -> None:
    view = showing()
    view.press("P")
    assert view.press("y") == Action("pause")
    view.show(frame(state="paused"))
    view.press("P")
    assert view.press("Y") == Action("resume")


def test_a_frozen_view_stays_and_then_shows_the_present() -> None:
    view = showing(row(1))
    view.press("p")
    view.show(frame(row(2)))
    assert [each.id[:2] for each in view.rows] == ["01"]
    assert plain_text(view.draw(80, 24))[-1].startswith("FROZEN")
    view.press(" ")
    assert [each.id[:2] for each in view.rows] == ["02"]


def test_the_selected_request_stays_in_sight() -> None:
    view = showing(*(row(number) for number in range(50)))
    for key in decode(b"\x1b[B\x1bOB" + b"j" * 40):
        view.press(key)
    lines = plain_text(view.draw(80, 24))

    assert view.selected == f"41{ID[2:]}"
    assert any(line.startswith("41") for line in lines)
    view.press("up")
    assert view.selected == f"40{ID[2:]}"


def test_help_names_every_key() -> None:
    view = showing(row())
    view.press("?")
    text = "\n".join(plain_text(view.draw(80, 24)))
    assert all(told in text for told in ("abort the selected request", "freeze the view", "pause the daemon", "quit"))
    view.press("h")
    assert ID[2:] in plain_text(view.draw(80, 24))[17]


def test_names_from_clients_move_no_cursor() -> None:
    view = showing(row(client="\x1b[2Jeve\n"), rejected={"a\x07": 1})

    assert all(line.isprintable() for line in plain_text(view.draw(200)))


def test_a_lost_daemon_is_said_over_the_last_frame() -> None:
    view = showing(row())
    view.lost = "waiting for the daemon"
    lines = plain_text(view.draw(80, 24))

    assert lines[-1] == "waiting for the daemon"
    assert lines[0].startswith("tiny  ready")


def test_a_tiny_terminal_is_no_error() -> None:
    for width, height in ((1, 1), (20, 3), (80, 5)):
        assert len(showing(row()).draw(width, height)) == height


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0s"), (59.94, "59.9s"), (185, "3m 05s"), (7500, "2h 05m"), (100_000, "1d 03h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sequences_of_unknown_keys_are_left_out() -> None:
    assert decode(b"a\x1b[5~\x1b[1;5Cq\x1b") == ["a", "q"]
