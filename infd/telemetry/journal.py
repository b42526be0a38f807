"""The journal's native protocol: one datagram per record, with fields that `journalctl` can match."""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import re
import socket
from typing import Any

from infd.telemetry.backlog import FLUSH_S, Backlog, gap_record

SOCKET = "/run/systemd/journal/socket"

# syslog's levels; journalctl colours and filters records by level.
PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


_OF_LOGGING = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def fields_of(record: logging.LogRecord) -> list[tuple[str, Any]]:
    """Return the fields that `extra` added to a record, except fields whose value is None."""
    return [(key, value) for key, value in vars(record).items() if key not in _OF_LOGGING and value is not None]


def goes_to_journal(journal_stream: str, fd: int) -> bool:
    """Return whether `fd` is the stream that $JOURNAL_STREAM (`device:inode`) identifies.

    The variable alone is not sufficient: children with redirected output inherit the variable.
    """
    device, _, inode = journal_stream.partition(":")
    if not (device.isdecimal() and inode.isdecimal()):
        return False
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino) == (int(device), int(inode))


class JournalHandler(logging.Handler):
    """A handler that sends records with their fields to journald: `prompt=12` becomes INFD_PROMPT=12.

    A thread sends the records, because journald may stall. Records are lost while journald is not running.
    """

    def __init__(self, address: str = SOCKET) -> None:
        super().__init__()
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._backlog = Backlog(self._send, lambda lines: encode(self._fields(gap_record(lines))))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._backlog.put(encode(self._fields(record)))
        except Exception:  # as in logging's own handlers: a lost record must not end the daemon
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all records are sent, for at most FLUSH_S."""
        self._backlog.wait(FLUSH_S)

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "MESSAGE": self.format(record),
            "PRIORITY": PRIORITIES.get(record.levelno, 6),
            "SYSLOG_IDENTIFIER": "infd",
            "LOGGER": record.name,
            "CODE_FILE": record.pathname,
            "CODE_LINE": record.lineno,
            "CODE_FUNC": record.funcName,
        }
        for key, value in fields_of(record):
            fields["INFD_" + re.sub(r"[^A-Z0-9_]", "_", key.upper())] = value
        return fields

    def _send(self, payload: bytes) -> None:
        try:
            self._socket.sendto(payload, self._address)
        except OSError as error:
            if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
                raise
            self._send_as_file(payload)

    def _send_as_file(self, payload: bytes) -> None:
        # journald accepts records too large for a datagram, usually stack dumps, as sealed memfds.
        fd = os.memfd_create("infd-journal", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(payload)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
            self._socket.sendmsg([b""], [rights], 0, self._address)
        finally:
            os.close(fd)


def encode(fields: dict[str, Any]) -> bytes:
    """Encode fields as `NAME=value` lines; if a value has line breaks, as name, length of the value and value."""
    lines = []
    for name, value in fields.items():
        data = str(value).encode(errors="replace")
        if b"\n" in data:
            lines.append(name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n")
        else:
            lines.append(name.encode() + b"=" + data + b"\n")
    return b"".join(lines)
