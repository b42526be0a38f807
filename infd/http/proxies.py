"""Find the client behind a trusted reverse proxy: by X-Forwarded-For, or by the PROXY protocol's header.

Only proxies in `server.trusted_proxies` are believed, because any client can send either.
Sources: HAProxy, "The PROXY protocol", versions 1 and 2; RFC 7239 on chains of proxies.
"""

from __future__ import annotations

import ipaddress
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.errors import ConfigError, InvalidHttp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.config import LiveConfig

UNIX: Final = "unix"  # means every connection to a Unix socket
LONGEST_LINE: Final = 107  # of a version 1 header, with its line break
LONGEST_BLOCK: Final = 4096  # of a version 2 header; proxies append certificates' names and the like
_SIGNATURE: Final = b"\r\n\r\n\x00\r\nQUIT\n"
_FIXED: Final = struct.Struct("!12sBBH")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Proxies:
    """The reverse proxies that the settings trust."""

    def __init__(self, live: LiveConfig) -> None:
        self._live = live

    def trusts(self, address: str) -> bool:
        """Return whether a proxy at this address is believed; an empty address is a Unix socket's."""
        trusted = self._live.now.server.trusted_proxies
        if not trusted:
            return False
        if not address:
            return UNIX in trusted
        try:
            found = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        return any(found in network for network in networks(trusted))

    def client(self, peer: str, forwarded: Iterable[str]) -> str:
        """Return the client's address: the last one in X-Forwarded-For that is not a trusted proxy's, or `peer`.

        peer       address of the connection; empty for a Unix socket
        forwarded  values of the header, in order
        """
        if not self.trusts(peer):
            return peer
        for address in reversed([part.strip() for value in forwarded for part in value.split(",")]):
            try:
                ipaddress.ip_address(address)
            except ValueError:
                return peer  # addresses before it may be forged
            if not self.trusts(address):
                return address
            peer = address
        return peer


@lru_cache(maxsize=16)
def networks(trusted: tuple[str, ...]) -> tuple[Network, ...]:
    """Return the networks of `server.trusted_proxies`. Raises ConfigError."""
    found = []
    for text in trusted:
        if text == UNIX:
            continue
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ConfigError(f"server.trusted_proxies: {error}; expected an address, a network or {UNIX!r}") from None
    return tuple(found)


class Header(Struct, frozen=True):
    """A PROXY header.

    address  the client's; None: the proxy speaks for itself, as in health checks
    length   bytes of the header
    """

    address: str | None
    length: int


def read(data: bytes | bytearray) -> Header | None:
    """Read the PROXY header at the beginning of a connection; None: more bytes are needed. Raises InvalidHttp."""
    start = bytes(data[: len(_SIGNATURE)])
    if start == _SIGNATURE:
        return _read_block(bytes(data))
    if _SIGNATURE.startswith(start) or b"PROXY ".startswith(start[:6]):
        if start[:6] == b"PROXY ":
            return _read_line(bytes(data[: LONGEST_LINE + 1]))
        return None
    raise InvalidHttp("the connection of a trusted proxy does not begin with a PROXY header")


def _read_line(data: bytes) -> Header | None:
    line, ended, _ = data.partition(b"\r\n")
    if not ended:
        if len(data) >= LONGEST_LINE:
            raise InvalidHttp("the PROXY header is longer than 107 bytes")
        return None
    length, words = len(line) + 2, line.decode("ascii", "replace").split(" ")
    if words[1] == "UNKNOWN":
        return Header(None, length)
    if len(words) != 6 or words[1] not in ("TCP4", "TCP6"):
        raise InvalidHttp("the PROXY header is malformed")
    return Header(_address(words[2], 4 if words[1] == "TCP4" else 6), length)


def _read_block(data: bytes) -> Header | None:
    if len(data) < _FIXED.size:
        return None
    _, command, family, size = _FIXED.unpack_from(data)
    if command >> 4 != 2 or command & 15 > 1 or size > LONGEST_BLOCK:
        raise InvalidHttp("the PROXY header is malformed")
    length = _FIXED.size + size
    if len(data) < length:
        return None
    block = data[_FIXED.size : length]
    if command & 15 == 0 or family not in (0x11, 0x21):  # LOCAL, or neither TCP over IPv4 nor over IPv6
        return Header(None, length)
    width = 4 if family == 0x11 else 16
    if len(block) < 2 * width + 4:
        raise InvalidHttp("the PROXY header is malformed")
    return Header(str(ipaddress.ip_address(block[:width])), length)


def _address(text: str, version: int) -> str:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        raise InvalidHttp("the PROXY header is malformed") from None
    if found.version != version:
        raise InvalidHttp("the PROXY header is malformed")
    return str(found)
