"""Authenticate and authorize peers of the admin socket.

The kernel reports a peer's uid, pid and groups as of its connect(2).
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

_SO_PEERGROUPS = 59  # from <asm-generic/socket.h>; Python's socket module lacks this constant
_LONGEST_ANSWER = 1024  # bytes; Python's limit on the result of getsockopt


class Peer(Struct, frozen=True):
    """Credentials of a connected process."""

    uid: int
    pid: int
    groups: frozenset[int]  # primary and supplementary groups


class HasOptions(Protocol):
    """A socket, or uvloop's object for a transport's socket."""

    def getsockopt(self, level: int, option: int, buflen: int, /) -> bytes: ...


def peer_of(connection: HasOptions) -> Peer:
    """Read the credentials of a Unix-socket connection."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(SOL_SOCKET, SO_PEERCRED, 12))
    return Peer(uid, pid, frozenset({gid, *_supplementary_groups(connection)}))


def _supplementary_groups(connection: HasOptions) -> Iterator[int]:
    # SO_PEERCRED returns the primary group only.
    try:
        packed = connection.getsockopt(SOL_SOCKET, _SO_PEERGROUPS, _LONGEST_ANSWER)
    except OSError:
        return  # ERANGE, over 256 groups: no supplementary group counts, so access is refused rather than granted
    for (gid,) in struct.iter_unpack("I", packed):
        yield gid


class Access(Struct, frozen=True):
    """Users and groups that may use the socket.

    owner            uid of the daemon; may use all verbs, as may root
    readers, admins  ids of the groups that may use reading verbs, and mutating verbs; None: no such group exists
    """

    owner: int
    readers: int | None
    admins: int | None

    @classmethod
    def of_this_process(cls) -> Access:
        """Return the access of root, this process's user, and the groups `infd` and `infd-admin`."""
        return cls(os.geteuid(), group_id(READERS), group_id(ADMINS))

    def allows(self, peer: Peer, *, mutation: bool) -> bool:
        """Return whether `peer` may use reading verbs, or with `mutation` mutating verbs."""
        if peer.uid in (0, self.owner):
            return True
        return (self.admins if mutation else self.readers) in peer.groups


def group_id(name: str) -> int | None:
    """Return a group's id; None if the group does not exist."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
