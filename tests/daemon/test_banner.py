"""The banner's commands can be pasted as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

from infd.daemon.banner import Readiness, first_chat

READY = Readiness(
    model="m",
    device="cpu",
    dtype="float32",
    addresses=("http://127.0.0.1:8000",),
    url="http://127.0.0.1:8000",
    admin="/run/infd/admin.sock",
    ready_s=1.0,
    key=False,
    embedded=False,
)
SCRIPTS = Path(sys.executable).parent


def test_on_path_infd_is_called_by_its_name(monkeypatch):
    monkeypatch.setenv("PATH", str(SCRIPTS))
    assert first_chat(READY) == "infd chat --url http://127.0.0.1:8000"


def test_elsewhere_by_its_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert first_chat(READY) == f"{SCRIPTS}/infd chat --url http://127.0.0.1:8000"
    monkeypatch.chdir(SCRIPTS.parent)
    assert first_chat(READY) == "bin/infd chat --url http://127.0.0.1:8000"


def test_another_infd_on_path_is_not_meant(monkeypatch, tmp_path):
    other = tmp_path / "infd"
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert first_chat(READY).startswith(f"{SCRIPTS}/infd ")
