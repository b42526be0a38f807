from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from infd.admin.peers import Access, Peer, group_id, peer_of

OWNER, STRANGER = 1000, 4711
READERS, ADMINS = 50, 60
ACCESS = Access(OWNER, READERS, ADMINS)


def peer(uid: int, *groups: int) -> Peer:
    return Peer(uid, 1, frozenset(groups))


@pytest.mark.parametrize(
    ("who", "reads", "mutates"),
    [
        (peer(0), True, True),
        (peer(OWNER), True, True),
        (peer(STRANGER), False, False),
        (peer(STRANGER, READERS), True, False),
        (peer(STRANGER, READERS, ADMINS), True, True),
        (peer(STRANGER, 7, 8), False, False),
    ],
)
def test_readers_read_and_admins_change(who: Peer, reads: bool, mutates: bool) -> None:
    assert ACCESS.allows(who, mutation=False) is reads
    assert ACCESS.allows(who, mutation=True) is mutates


def test_groups_that_do_not_exist_admit_no_peer() -> None:
    nowhere = Access(OWNER, None, None)
    assert not nowhere.allows(peer(STRANGER, 0, READERS), mutation=False)
    assert not nowhere.allows(peer(STRANGER, 0, ADMINS), mutation=True)
    assert nowhere.allows(peer(OWNER), mutation=True)


def test_a_group_without_an_entry_has_no_id() -> None:
    assert group_id("no-such-group-here") is None
    assert group_id("root") == 0


def test_the_kernel_names_this_process_as_its_own_peer() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        found = peer_of(here)
    assert (found.uid, found.pid) == (os.geteuid(), os.getpid())
    assert found.groups == {os.getegid(), *os.getgroups()}


class CrowdedSocket:
    """A connection whose peer has more groups than getsockopt returns."""

    def getsockopt(self, level: int, option: int, buflen: int, /) -> bytes:
        if option == socket.SO_PEERCRED:
            return struct.pack("3i", 99, STRANGER, 7)
        raise OSError(errno.ERANGE, "too many groups")


def test_a_peer_whose_groups_cannot_be_read_counts_with_its_primary_group_alone() -> None:
    found = peer_of(CrowdedSocket())
    assert found == Peer(STRANGER, 99, frozenset({7}))
    assert not ACCESS.allows(found, mutation=False)
