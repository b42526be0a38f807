"""Bind a Unix socket's path exclusively, and remove its file afterwards.

A socket file outlives its process, so the file's presence does not prove a live
server. The process that has locked the file PATH.lock owns the socket PATH; a
socket whose lock is free is stale. The owner removes both files, so a process
that has locked a file checks that the path still names that file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from infd.errors import ConfigError, SocketTaken


class UnixListener:
    """A bound Unix socket that only this process serves, not listening yet."""

    def __init__(
        self,
        path: str | Path,
        *,
        group: int | None = None,
        mode: int = 0o660,
        private: bool = False,
        make_directory: bool = True,
        purpose: str = "admin socket",
        setting: str = "admin.socket (--admin-socket)",
    ) -> None:
        """Bind `path`, replacing a stale socket.

        group    group id that may connect; None: the process's group
        mode     permission bits of the socket file
        private  require a directory that only this user may enter: all users may write to the parent directory
        make_directory  make the directory if it is missing; otherwise a missing directory is an error
        purpose  name of the socket in error messages
        setting  setting that error messages advise to change

        Raises SocketTaken if a live daemon has locked the path, ConfigError if the path cannot be bound.
        """
        self.path = Path(path)
        self._lock_path = Path(f"{path}.lock")
        self._purpose = purpose
        self._setting = setting
        try:
            if make_directory:
                self._make_directory(group, private=private)
            self._lock = self._take_lock()
        except OSError as error:
            raise self._unusable(error) from error
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._remove_stale()
            self.socket.bind(str(self.path))
            # No client connects before listen(), so chmod is early enough; umask would affect every thread.
            os.chmod(self.path, mode)
            if group is not None:
                os.chown(self.path, -1, group)
        except OSError as error:
            self._release()  # leaves a stale socket file if bind succeeded; the next process replaces the file
            raise self._unusable(error) from error
        except ConfigError:
            self._release()
            raise

    def close(self) -> None:
        """Remove the socket file and the lock file, then release the lock."""
        self.path.unlink(missing_ok=True)
        self._lock_path.unlink(missing_ok=True)
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
        if private and accessible_to_others(directory):
            raise ConfigError(
                f"{directory} is not a directory that this user alone may enter (mode 0700), so whoever made it could"
                f" pose as infd; remove it, or set {self._setting} to another path"
            )

    def _take_lock(self) -> int:
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(lock, 32).decode(errors="replace").strip()
                os.close(lock)
                raise SocketTaken(
                    f"another infd (pid {holder or 'unknown'}) serves the {self._purpose} {self.path};"
                    f" stop it, or set {self._setting} to another path"
                ) from None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), os.stat(self._lock_path, follow_symlinks=False)):
                    break
            os.close(lock)  # the last owner removed this file between open and flock
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


def accessible_to_others(directory: Path) -> bool:
    """Return whether `directory` exists and is no directory, not this user's, or accessible to other users."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or bool(found.st_mode & 0o077)
