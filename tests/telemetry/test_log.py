"""The format of log lines, which no field can forge."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import LogConfig
from infd.telemetry import log
from infd.telemetry.backlog import gap_record
from infd.telemetry.journal import JournalHandler, encode, goes_to_journal

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("restored_logging")

PATIENCE_S = 30.0  # only a test that fails waits this long


def record(message: str, level: int = logging.INFO, **fields: Any) -> logging.LogRecord:
    return logging.getLogger("infd.test").makeRecord("infd.test", level, "file.py", 1, message, (), None, extra=fields)


def test_plain_lines_carry_their_fields() -> None:
    line = log.Plain().format(record("ready", model="tiny", ready_s=0.25, nothing=None))

    assert line.endswith(" INFO infd.test ready model=tiny ready_s=0.25")
    assert line[:4].isdecimal()
    assert line.partition(" ")[0].endswith("Z")


@pytest.mark.parametrize("evil", ["a\nb", "a\r\nb", "a\x1b[2Jb", "a b=c", 'a"b', "a\u2028b", ""])
def test_a_field_can_neither_break_a_line_nor_pose_as_another_field(evil: str) -> None:
    line = log.Plain().format(record("request", client=evil))
    value = line.partition(" client=")[2]

    assert line.isprintable()
    assert line.isascii()
    assert value.startswith('"')
    assert value.endswith('"')


def test_json_in_a_field_is_escaped_once() -> None:
    line = log.Plain().format(record("verb", asked='{"path":"/a\u00e4"}'))

    assert json.loads(line.partition(" asked=")[2]) == '{"path":"/a\u00e4"}'


def test_a_library_that_logs_by_itself_is_adopted(capfd: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("library")
    library.addHandler(logging.StreamHandler(sys.stderr))
    library.propagate = False
    log.configure(LogConfig(format="json"))
    log.adopt("library")

    library.warning("raw")

    logging.getLogger().handlers[0].flush()
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "raw"


def test_continued_messages_are_indented() -> None:
    line = log.Plain().format(record("one\n2026 INFO infd.test forged"))

    assert line.splitlines()[1].startswith("    ")


def test_json_lines_are_objects() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        entry = record("oops", logging.ERROR, tokens=3)
        entry.exc_info = sys.exc_info()
    line = log.Json().format(entry)

    parsed = json.loads(line)
    assert "\n" not in line
    assert (parsed["level"], parsed["logger"], parsed["message"], parsed["tokens"]) == ("error", "infd.test", "oops", 3)
    assert "ValueError: broken" in parsed["exception"]


def test_levels_and_the_access_line_are_settings(capfd: pytest.CaptureFixture[str]) -> None:
    log.configure(LogConfig(level="warning", format="plain", access=True))
    logging.getLogger("infd.engine").info("hidden")
    logging.getLogger("infd.engine").warning("shown")
    log.configure(LogConfig(level="info", format="plain", access=False))
    log.access(request_id="hidden")
    log.configure(LogConfig(level="info", format="plain", access=True))
    log.access(request_id="r1", prompt=3)
    logging.getLogger("aiohttp").info("hidden")

    error = capfd.readouterr().err
    assert "hidden" not in error
    assert "WARNING infd.engine shown" in error
    assert "INFO infd.access request request_id=r1 prompt=3" in error


def test_the_journal_is_recognised_by_the_stream_not_by_the_variable_alone(tmp_path: Path) -> None:
    with (tmp_path / "a").open("w") as stream, (tmp_path / "b").open("w") as other:
        status = os.fstat(stream.fileno())
        journal_stream = f"{status.st_dev}:{status.st_ino}"

        assert goes_to_journal(journal_stream, stream.fileno())
        assert not goes_to_journal(journal_stream, other.fileno())
        assert not goes_to_journal("", stream.fileno())
        assert not goes_to_journal("x:y", stream.fileno())


def test_the_journal_gets_fields_and_priority(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        journal.settimeout(PATIENCE_S)
        handler = JournalHandler(str(tmp_path / "journal"))
        handler.handle(record("ready", logging.WARNING, model="tiny"))
        lines = journal.recv(65536).decode().splitlines()
        handler.close()

    assert {"MESSAGE=ready", "PRIORITY=4", "LOGGER=infd.test", "INFD_MODEL=tiny", "SYSLOG_IDENTIFIER=infd"} <= set(
        lines
    )


def test_values_with_line_breaks_are_length_prefixed() -> None:
    assert encode({"A": "x", "B": "1\n2"}) == b"A=x\nB\n" + (3).to_bytes(8, "little") + b"1\n2\n"


def test_a_record_too_large_for_a_datagram_is_sent_as_a_sealed_file(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        journal.settimeout(PATIENCE_S)
        handler = JournalHandler(str(tmp_path / "journal"))
        handler.handle(record("x" * 2**20))
        data, fds, _, _ = socket.recv_fds(journal, 16, 1)
        handler.close()

    with open(fds[0], "rb") as file:
        file.seek(0)
        assert data == b""
        assert b"MESSAGE=" + b"x" * 2**20 + b"\n" in file.read()


def test_a_journal_that_is_gone_ends_nothing(tmp_path: Path) -> None:
    handler = JournalHandler(str(tmp_path / "journal"))
    handler.handle(record("lost"))
    handler.flush()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        journal.settimeout(PATIENCE_S)
        handler.handle(record("back"))
        assert b"MESSAGE=back\n" in journal.recv(65536)
        handler.close()


def test_a_stalled_journal_delays_no_caller(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        journal.settimeout(PATIENCE_S)
        handler = JournalHandler(str(tmp_path / "journal"))
        for i in range(3000):  # more than a socket's queue holds
            handler.handle(record("many", number=i))
        numbers = [int(re.findall(rb"INFD_NUMBER=(\d+)", journal.recv(65536))[0]) for _ in range(3000)]
        handler.close()

    assert numbers == [*range(3000)]


def test_lost_lines_are_reported_as_a_record_with_their_count() -> None:
    line = log.Plain().format(gap_record(7))

    assert line.endswith(" WARNING infd.log lines were lost: the log's reader did not keep up dropped=7")
