"""Accept connections with TLS, and log failed handshakes.

An asyncio server ends a connection whose handshake fails without calling its protocol, so neither address nor reason
could be logged. Here each accepted socket has a task, which receives the error of its handshake.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import TYPE_CHECKING, Final

from infd.sockets.tls import refused_handshake

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from infd.telemetry.metrics import Metrics

_LOG = logging.getLogger("infd.http")

QUIET_S: Final = 10.0  # between two log lines about failed handshakes
BURST: Final = 64  # most connections accepted in one iteration of the event loop
RETRY_S: Final = 0.1  # after a lack of descriptors or memory
_LACKING: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Handshakes:
    """The handshakes in progress."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._quiet_until = 0.0
        self._unlogged = 0

    def begin(
        self,
        client: socket.socket,
        peer: str,
        accept: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        timeout_s: float,
    ) -> None:
        """Connect the socket accepted from `peer` to a new protocol once its handshake is done."""
        handshake = self._run(client, peer, accept, tls, timeout_s)
        task = asyncio.get_running_loop().create_task(handshake, name="tls-handshake")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End the connections whose handshakes are in progress."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(
        self,
        client: socket.socket,
        peer: str,
        accept: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext,
        timeout_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        try:  # on an error the loop closes the socket
            await loop.connect_accepted_socket(accept, client, ssl=tls, ssl_handshake_timeout=timeout_s)
        except ConnectionResetError:
            pass  # the client has left, as probes of the port do
        except OSError as error:
            self.failed(peer, error)

    def failed(self, peer: str, error: OSError) -> None:
        """Count a failed handshake, and log it unless another was logged in the last QUIET_S."""
        self._metrics.dropped["bad_handshake"] += 1
        now = self._clock()
        if now < self._quiet_until:
            self._unlogged += 1
            return
        unlogged = {"unlogged": self._unlogged} if self._unlogged else {}
        _LOG.warning("TLS handshake failed", extra={"peer": peer, "reason": refused_handshake(error), **unlogged})
        self._quiet_until, self._unlogged = now + QUIET_S, 0


class TlsListener:
    """Accepts connections at a socket until `close`, which closes the socket but no connection."""

    def __init__(self, listening: socket.socket, backlog: int, begin: Callable[[socket.socket, str], None]) -> None:
        """Listen.

        begin  takes over an accepted socket; receives the client's address too
        """
        self._listening = listening
        self._begin = begin
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(backlog)
        self._resume()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._listening)
        self._listening.close()

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(BURST):
            try:
                client, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _LACKING:
                    raise
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(RETRY_S, self._resume)
                return
            client.setblocking(False)
            self._begin(client, str(address[0]))
