"""Bind the HTTP endpoint's TCP and Unix sockets, or inherit them from systemd."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from infd.errors import AddressUnavailable
from infd.sockets.unix import UnixListener

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.config import ServerConfig

UNIX: Final = "unix:"
FIRST_INHERITED: Final = 3  # sd_listen_fds(3)

# A host name may resolve to an address of a family that this machine lacks; the other addresses are still bound.
_ABSENT: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class PublicSockets:
    """The endpoint's bound sockets. The server closes the sockets; `close` removes the files of Unix sockets.

    inherited  whether systemd passed the sockets. systemd keeps these open, so connections queue while no daemon runs
    """

    def __init__(
        self, sockets: list[socket.socket], files: list[UnixListener], *, inherited: bool = False, tls: bool = False
    ) -> None:
        self.sockets = sockets
        self.inherited = inherited
        self.addresses = [address(listener, "https" if tls else "http") for listener in sockets]
        self._files = files

    @classmethod
    def bind(cls, server: ServerConfig) -> PublicSockets:
        """Bind all hosts in `server.host`; an error leaves none bound.

        Raises AddressUnavailable, SocketTaken, ConfigError.
        """
        sockets: list[socket.socket] = []
        files: list[UnixListener] = []
        port = server.port
        with ExitStack() as undo:
            for host in server.host:
                if host.startswith(UNIX):
                    file = UnixListener(
                        host.removeprefix(UNIX),
                        mode=int(server.unix_mode, 8),
                        make_directory=False,
                        purpose="socket",
                        setting="server.host (--host)",
                    )
                    undo.callback(file.close)
                    files.append(file)
                    sockets.append(file.socket)
                    continue
                for listener in _bind_all(host.removeprefix("[").removesuffix("]"), port, server.host):
                    undo.callback(listener.close)
                    sockets.append(listener)
                    port = listener.getsockname()[1]  # with port 0 all hosts get the first host's port
            undo.pop_all()
        return cls(sockets, files, tls=bool(server.tls_certificate))

    @classmethod
    def inherit(cls, count: int, *, tls: bool = False) -> PublicSockets:
        """Adopt the `count` listening sockets that systemd passed."""
        sockets = []
        for fd in range(FIRST_INHERITED, FIRST_INHERITED + count):
            os.set_inheritable(fd, False)
            listener = socket.socket(fileno=fd)
            listener.setblocking(False)
            sockets.append(listener)
        return cls(sockets, [], inherited=True, tls=tls)

    @property
    def url(self) -> str:
        """Return the endpoint's URL for clients on this machine."""
        for wildcard in ("//0.0.0.0:", "//[::]:"):
            if wildcard in self.addresses[0]:
                return self.addresses[0].replace(wildcard, "//localhost:")
        return self.addresses[0]

    @property
    def reachable_from_outside(self) -> list[str]:
        """Return the addresses that other machines can connect to."""
        reached = zip(self.addresses, self.sockets, strict=True)
        return [address for address, listener in reached if not _is_local(listener)]

    def close(self) -> None:
        """Remove the Unix sockets' files."""
        for file in self._files:
            file.close()
        self._files.clear()


def address(listener: socket.socket, scheme: str = "http") -> str:
    """Return a bound socket's address as a URL."""
    name = listener.getsockname()
    if listener.family == socket.AF_UNIX:
        return f"{UNIX}{name}"
    host, port = name[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _is_local(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return True
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _bind_all(host: str, port: int, hosts: tuple[str, ...]) -> list[socket.socket]:
    """Bind every address of `host` that this machine has; an error leaves none bound. Raises AddressUnavailable."""
    bound: list[socket.socket] = []
    refused: OSError | None = None
    try:
        for family, address in _addresses(host, port):
            place = (address[0], bound[0].getsockname()[1], *address[2:]) if bound else address
            try:
                bound.append(_bind(family, place, only_ipv6="0.0.0.0" in hosts))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                refused = error
        if not bound:
            raise refused or OSError(f"{host} has no address")
    except OSError as error:
        for listener in bound:
            listener.close()
        raise AddressUnavailable(host, port, error) from error
    return bound


def _addresses(host: str, port: int) -> Iterator[tuple[int, Any]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    yield from dict.fromkeys((family, address) for family, _, _, _, address in found)


def _bind(family: int, address: Any, *, only_ipv6: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restart may bind while old connections are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # Without IPV6_V6ONLY `::` also binds IPv4, which fails if 0.0.0.0 is bound as well.
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        listener.bind(address)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
