"""A Unix socket's file: who holds it, and that none is left behind.

A socket file outlives its process, so its presence says nothing. A lock beside
it does: whoever holds the lock owns the socket, and a file without a lock
holder is stale. The lock file itself stays, because removing it would let two
processes each hold a lock on "the" file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from infd.errors import ConfigError, SocketTaken


class Listener:
    """A bound Unix socket that only this process serves. It does not listen yet."""

    def __init__(
        self,
        path: str | Path,
        *,
        group: int | None = None,
        mode: int = 0o660,
        private: bool = False,
        purpose: str = "admin socket",
        setting: str = "admin.socket (--admin-socket)",
    ) -> None:
        """Take `path`, replacing a stale socket.

        group    who may connect besides the owner; None: the owner's own group
        private  its directory must be this user's alone, for it lies where everybody may make one
        purpose  what it is to operators
        setting  where they choose another path

        Raises SocketTaken if a live daemon holds the path, ConfigError if it cannot be a socket.
        """
        self.path = Path(path)
        self._purpose = purpose
        self._setting = setting
        try:
            self._make_directory(group, private=private)
            self._lock = self._take_lock()
        except OSError as error:
            raise self._unusable(error) from error
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_stale()
            self.socket.bind(str(self.path))
            # Nobody can connect before listen(), so the mode need not be right earlier (umask is every thread's).
            os.chmod(self.path, mode)
            if group is not None:
                os.chown(self.path, -1, group)
        except OSError as error:
            self._release()  # a file that was made is stale now, and the next one replaces it
            raise self._unusable(error) from error
        except ConfigError:
            self._release()
            raise

    def close(self) -> None:
        """Remove the socket and let the path go."""
        self.path.unlink(missing_ok=True)
        self._release()

    def _release(self) -> None:
        self.socket.close()
        os.close(self._lock)

    def _make_directory(self, group: int | None, *, private: bool) -> None:
        directory = self.path.parent
        if not directory.exists():
            directory.mkdir(0o700 if private else 0o750, parents=True)
            if group is not None and not private:
                os.chown(directory, -1, group)
        if private and usurped(directory):
            raise ConfigError(
                f"{directory} is not a directory that this user alone may enter (mode 0700), so whoever made it could"
                f" pose as infd; remove it, or set {self._setting} to another path"
            )

    def _take_lock(self) -> int:
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace").strip()
            os.close(lock)
            raise SocketTaken(
                f"another infd (pid {holder or 'unknown'}) serves the {self._purpose} {self.path};"
                f" stop it, or set {self._setting} to another path"
            ) from None
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock

    def _remove_stale(self) -> None:
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"{self.path} exists and is not a socket; move it away, or set {self._setting} to another path"
            )
        self.path.unlink()

    def _unusable(self, error: OSError) -> ConfigError:
        if error.errno == errno.EACCES:
            advice = f"run as a user who may write there, or set {self._setting} to another path"
        else:
            advice = f"set {self._setting} to another path"
        return ConfigError(f"cannot make the {self._purpose} {self.path}: {error.strerror or error}; {advice}")


def usurped(directory: Path) -> bool:
    """Say whether a directory exists that is not this user's alone, so that others may pose as what is served there."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or bool(found.st_mode & 0o077)
