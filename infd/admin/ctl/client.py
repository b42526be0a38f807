"""HTTP client of the admin socket; each failure has an exit code."""

from __future__ import annotations

import http.client
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from infd.admin.protocol import ANSWER_TYPE, FEED_TYPE, PROBLEM_TYPE, Problem
from infd.unixhttp import UnixConnection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Reply = TypeVar("Reply", bound=msgspec.Struct)


class Failure(click.ClickException):
    """A failed command, with its exit code."""


class Refused(Failure):
    exit_code = 1


class Unreachable(Failure):
    exit_code = 3


class WrongState(Failure):
    exit_code = 4


class TimedOut(Failure):
    exit_code = 5


class AdminClient:
    """Client of the daemon at the first existing path in `sockets`.

    timeout_s  maximum seconds to wait for an answer

    All methods raise Failure.
    """

    def __init__(self, sockets: Sequence[str], *, timeout_s: float = 10.0) -> None:
        self._sockets = sockets
        self._timeout_s = timeout_s

    def get(self, path: str, reply: type[Reply], *, timeout_s: float | None = None) -> Reply:
        """Call a reading verb and return the answer. `timeout_s`: in place of the client's, if it is less."""
        client = self if timeout_s is None else AdminClient(self._sockets, timeout_s=min(timeout_s, self._timeout_s))
        return client._ask("GET", path, reply)

    def post(
        self, path: str, reply: type[Reply], arguments: Mapping[str, object] | None = None, *, patient: bool = False
    ) -> Reply:
        """Call a mutating verb and return the answer. `patient`: wait for the answer without a timeout."""
        body = b"" if arguments is None else msgspec.json.encode(arguments)
        return self._ask("POST", path, reply, body, patient=patient)

    def read(self, path: str, reply: type[Reply]) -> Iterator[Reply]:
        """Yield a feed's items on arrival, without a timeout."""
        with self.subscribed(path, reply) as items:
            yield from items

    @contextmanager
    def subscribed(self, path: str, reply: type[Reply]) -> Iterator[Iterator[Reply]]:
        """Subscribe to a feed before the block begins, and yield its items as `read` does."""
        with self._exchange("GET", path, patient=True) as response:
            _require(response, FEED_TYPE)
            yield (msgspec.json.decode(line, type=reply) for line in response)

    def _ask(self, method: str, path: str, reply: type[Reply], body: bytes = b"", *, patient: bool = False) -> Reply:
        with self._exchange(method, path, body, patient=patient) as response:
            _require(response, ANSWER_TYPE)
            return msgspec.json.decode(response.read(), type=reply)

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes = b"", *, patient: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request and yield the response. Connection errors, within the block too, are raised as Failures."""
        where = next(filter(os.path.exists, self._sockets), None)
        if where is None:
            raise Unreachable(f"no daemon: nothing is at {' or '.join(self._sockets)}; {_START_OR_NAME}")
        connection = UnixConnection(where, None if patient else self._timeout_s)
        try:
            connection.request(method, path, body)
            yield connection.getresponse()
        except PermissionError:
            raise Refused(f"not allowed to open {where}; use sudo, or join group infd and log in again") from None
        except ConnectionRefusedError:
            condition = (
                "left over from a daemon that has exited" if stat.S_ISSOCK(os.stat(where).st_mode) else "not a socket"
            )
            raise Unreachable(f"no daemon: {where} is {condition}; {_START_OR_NAME}") from None
        except TimeoutError:
            raise TimedOut(
                f"the daemon at {where} did not answer within {self._timeout_s:g} s; its log may say why,"
                " and SIGQUIT makes it write its stacks there and exit"
            ) from None
        except (_Misunderstood, msgspec.MsgspecError):
            raise Unreachable(f"the server at {where} does not speak infd's admin protocol; {_START_OR_NAME}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"lost the daemon at {where}: {error!r}; see whether it is still running") from None
        finally:
            connection.close()


class _Misunderstood(Exception):
    pass


def _require(response: http.client.HTTPResponse, kind: str) -> None:
    """Raise the Failure that a problem document reports; _Misunderstood if the content type is not `kind`."""
    found = response.headers.get_content_type()
    if response.status >= http.HTTPStatus.MULTIPLE_CHOICES and found == PROBLEM_TYPE:
        problem = msgspec.json.decode(response.read(), type=Problem)
        raise (WrongState if problem.status == http.HTTPStatus.CONFLICT else Refused)(problem.detail)
    if found != kind:
        raise _Misunderstood


_START_OR_NAME = "start one with `infd start`, or name its socket with --socket or INFD_ADMIN_SOCKET"
