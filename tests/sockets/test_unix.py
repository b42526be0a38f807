from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from infd.errors import ConfigError, StartError
from infd.sockets.unix import UnixListener, accessible_to_others

if TYPE_CHECKING:
    from pathlib import Path


def test_only_owner_and_group_may_open_the_socket(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "admin.sock", group=os.getegid())
    status = (tmp_path / "admin.sock").stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert status.st_gid == os.getegid()
    listener.close()


def test_closing_leaves_no_files_behind(tmp_path: Path) -> None:
    UnixListener(tmp_path / "admin.sock").close()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_the_settings_misspell_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        UnixListener(tmp_path / "nifd" / "admin.sock", make_directory=False)
    assert not list(tmp_path.iterdir())


def test_processes_that_take_turns_never_own_a_socket_together(tmp_path: Path) -> None:
    taken = """
import os, sys
from infd.errors import SocketTaken
from infd.sockets.unix import UnixListener
for _ in range(300):
    try:
        listener = UnixListener(sys.argv[1])
    except SocketTaken:
        continue
    with open(sys.argv[2], "x"):
        pass
    os.unlink(sys.argv[2])
    listener.close()
"""
    command = [sys.executable, "-c", taken, str(tmp_path / "admin.sock"), str(tmp_path / "owner")]
    processes = [subprocess.Popen(command) for _ in range(3)]

    assert [process.wait() for process in processes] == [0, 0, 0]


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = UnixListener(path)
    listener.socket.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    listener.close()


def test_a_live_socket_is_refused_and_left_alone(tmp_path: Path) -> None:
    first = UnixListener(tmp_path / "admin.sock")
    with pytest.raises(StartError, match=rf"pid {os.getpid()}\b.*--admin-socket"):
        UnixListener(tmp_path / "admin.sock")
    assert (tmp_path / "admin.sock").is_socket()
    first.close()
    UnixListener(tmp_path / "admin.sock").close()


def test_a_file_that_is_not_a_socket_is_never_removed(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        UnixListener(path)
    assert path.read_text() == "precious"
    path.unlink()
    UnixListener(path).close()  # the lock was released


def test_a_missing_directory_is_made_closed_to_others(tmp_path: Path) -> None:
    listener = UnixListener(tmp_path / "infd" / "admin.sock")
    assert stat.S_IMODE((tmp_path / "infd").stat().st_mode) & 0o007 == 0
    listener.close()


def test_a_private_directory_is_this_users_alone(tmp_path: Path) -> None:
    own = tmp_path / "infd-7"
    assert not accessible_to_others(own)
    UnixListener(own / "admin.sock", group=os.getegid(), private=True).close()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert not accessible_to_others(own)

    (tmp_path / "infd-8").symlink_to(own)
    with pytest.raises(ConfigError, match=r"mode 0700.*--admin-socket"):
        UnixListener(tmp_path / "infd-8" / "admin.sock", private=True)
    own.chmod(0o770)
    with pytest.raises(ConfigError, match=r"mode 0700.*--admin-socket"):
        UnixListener(own / "admin.sock", private=True)


def test_a_path_that_cannot_be_a_socket_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"admin\.socket"):
        UnixListener(tmp_path / ("x" * 150) / "admin.sock")
    assert not list(tmp_path.rglob("*.sock"))
