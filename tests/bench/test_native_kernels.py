"""infd is not measured without its native kernels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from native_kernels import LOGGED, require_native_kernels
from server_process import ServerProcess, free_port

from infd.kernels.cpu import library
from infd.runner.pulse import Pulse
from infd.runner.start.loading import build
from tests.runner.start.test_loading import settings

if TYPE_CHECKING:
    from pathlib import Path

STALE = "built from other sources than the present ones: `make native` rebuilds it"
SERVER = """
import http.server, sys
print(sys.argv[2], flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_benchmark_ends_with_the_reason_and_the_remedy(built, monkeypatch: pytest.MonkeyPatch) -> None:
    require_native_kernels()
    monkeypatch.setattr(library, "why_not", lambda isa=None: STALE)
    with pytest.raises(SystemExit, match=r"nothing is measured.*`make native`"):
        require_native_kernels()


def test_a_daemon_logs_the_line_that_benchmarks_look_for(
    built, tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = build(settings(tiny("qwen3")), Pulse())
    loaded.residence.close()
    assert "native_missing" not in loaded.facts
    assert LOGGED not in caplog.text

    monkeypatch.setattr(library, "why_not", lambda isa=None: STALE)
    loaded = build(settings(tiny("qwen3")), Pulse())
    loaded.residence.close()
    assert loaded.facts["native_missing"] == STALE
    assert [record.levelname for record in caplog.records if LOGGED in record.message and STALE in record.message] == [
        "WARNING"
    ]


@pytest.mark.parametrize(("line", "refused"), [("ready", False), (f"a warning: {LOGGED}: {STALE}", True)])
async def test_a_server_that_logs_the_line_is_not_measured(tmp_path: Path, line: str, refused: bool) -> None:
    port = free_port()
    server = ServerProcess(
        "infd", [sys.executable, "-u", "-c", SERVER, str(port), line], port, log=tmp_path / "infd.log"
    )
    if refused:
        with pytest.raises(RuntimeError, match=r"infd is not measured: .*`make native`"):
            async with server:
                pass
    else:
        async with server:
            pass
