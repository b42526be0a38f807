"""How `infdctl` reaches the daemon, and the exit code of each way in which that fails."""

from __future__ import annotations

import http.client
import os
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from infd.admin.protocol import ANSWER_TYPE, NEWS_TYPE, PROBLEM_TYPE, Problem
from infd.unixhttp import UnixConnection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Reply = TypeVar("Reply", bound=msgspec.Struct)


class Failure(click.ClickException):
    """A command that did not do what it was asked for."""


class Refused(Failure):
    exit_code = 1


class Unreachable(Failure):
    exit_code = 3


class WrongState(Failure):
    exit_code = 4


class TimedOut(Failure):
    exit_code = 5


class AdminClient:
    """Asks the daemon that serves the first of `sockets` that exists.

    timeout_s  how long one answer may take
    """

    def __init__(self, sockets: Sequence[str], *, timeout_s: float = 10.0) -> None:
        self._sockets = sockets
        self._timeout_s = timeout_s

    def get(self, path: str, reply: type[Reply]) -> Reply:
        return self._ask("GET", path, reply)

    def post(
        self, path: str, reply: type[Reply], asked: Mapping[str, object] | None = None, *, patient: bool = False
    ) -> Reply:
        """asked: what the verb is told. patient: the answer may take as long as it takes."""
        body = b"" if asked is None else msgspec.json.encode(asked)
        return self._ask("POST", path, reply, body, patient=patient)

    def read(self, path: str, reply: type[Reply]) -> Iterator[Reply]:
        """Yield news as they come, for as long as they may."""
        with self._asked("GET", path, patient=True) as response:
            _require(response, NEWS_TYPE)
            for line in response:
                yield msgspec.json.decode(line, type=reply)

    def _ask(self, method: str, path: str, reply: type[Reply], body: bytes = b"", *, patient: bool = False) -> Reply:
        with self._asked(method, path, body, patient=patient) as response:
            _require(response, ANSWER_TYPE)
            return msgspec.json.decode(response.read(), type=reply)

    @contextmanager
    def _asked(
        self, method: str, path: str, body: bytes = b"", *, patient: bool = False
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask, and lend the response to be read. Whatever goes wrong with either becomes a Failure."""
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
            what = "left over from one that is gone" if stat.S_ISSOCK(os.stat(where).st_mode) else "not a socket"
            raise Unreachable(f"no daemon: {where} is {what}; {_START_OR_NAME}") from None
        except TimeoutError:
            raise TimedOut(
                f"the daemon at {where} did not answer within {self._timeout_s:g} s; its log may say why,"
                " and SIGQUIT makes it write its stacks there and exit"
            ) from None
        except (_Misunderstood, msgspec.MsgspecError):
            raise Unreachable(
                f"what answers at {where} does not speak infd's admin protocol; {_START_OR_NAME}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"lost the daemon at {where}: {error!r}; see whether it is still running") from None
        finally:
            connection.close()


class _Misunderstood(Exception):
    pass


def _require(response: http.client.HTTPResponse, kind: str) -> None:
    """Raise what a response means that is not of the kind hoped for."""
    found = response.headers.get_content_type()
    if response.status >= http.HTTPStatus.MULTIPLE_CHOICES and found == PROBLEM_TYPE:
        problem = msgspec.json.decode(response.read(), type=Problem)
        raise (WrongState if problem.status == http.HTTPStatus.CONFLICT else Refused)(problem.detail)
    if found != kind:
        raise _Misunderstood


_START_OR_NAME = "start one with `infd start`, or name its socket with --socket or INFD_ADMIN_SOCKET"
