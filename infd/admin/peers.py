"""Who is at the other end of the admin socket, and what they may do.

The kernel vouches for uid, pid and groups, as they were when the peer connected.
"""

from __future__ import annotations

import grp
import os
import struct
from socket import SO_PEERCRED, SOL_SOCKET
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterator

READERS = "infd"
ADMINS = "infd-admin"

_SO_PEERGROUPS = 59  # <asm-generic/socket.h>; Python's socket module does not name it
_LONGEST_ANSWER = 1024  # bytes that Python lets getsockopt return


class Peer(Struct, frozen=True):
    uid: int
    pid: int
    groups: frozenset[int]  # primary and supplementary


class HasOptions(Protocol):
    """A socket, or what uvloop shows of one."""

    def getsockopt(self, level: int, option: int, buflen: int, /) -> bytes: ...


def peer_of(connection: HasOptions) -> Peer:
    """Read the credentials of a Unix-socket connection."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(SOL_SOCKET, SO_PEERCRED, 12))
    return Peer(uid, pid, frozenset({gid, *_supplementary_groups(connection)}))


def _supplementary_groups(connection: HasOptions) -> Iterator[int]:
    # SO_PEERCRED carries the primary group only.
    try:
        packed = connection.getsockopt(SOL_SOCKET, _SO_PEERGROUPS, _LONGEST_ANSWER)
    except OSError:
        return  # ERANGE, over 256 groups: none counts, so such a peer is refused rather than trusted
    for (gid,) in struct.iter_unpack("I", packed):
        yield gid


class Access(Struct, frozen=True):
    """Who may use the socket.

    readers, admins  group ids; None where the group does not exist on this machine
    """

    owner: int
    readers: int | None
    admins: int | None

    @classmethod
    def of_this_process(cls) -> Access:
        return cls(os.geteuid(), group_id(READERS), group_id(ADMINS))

    def allows(self, peer: Peer, *, mutation: bool) -> bool:
        if peer.uid in (0, self.owner):
            return True
        return (self.admins if mutation else self.readers) in peer.groups


def group_id(name: str) -> int | None:
    """Return a group's id, or None if there is no such group."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
