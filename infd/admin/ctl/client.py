"""How `infdctl` reaches the daemon, and the exit code of each way in which that fails."""

from __future__ import annotations

import http.client
import os
import stat
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from infd.admin.protocol import PROBLEM_TYPE, Problem
from infd.unixhttp import UnixConnection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    def _ask(self, method: str, path: str, reply: type[Reply], body: bytes = b"", *, patient: bool = False) -> Reply:
        where = next(filter(os.path.exists, self._sockets), None)
        if where is None:
            raise Unreachable(f"no daemon: nothing is at {' or '.join(self._sockets)}; {_START_OR_NAME}")
        connection = UnixConnection(where, None if patient else self._timeout_s)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            answer = response.read()
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
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"lost the daemon at {where}: {error!r}; see whether it is still running") from None
        finally:
            connection.close()
        try:
            if response.status < 300:
                return msgspec.json.decode(answer, type=reply)
            if response.headers.get_content_type() == PROBLEM_TYPE:
                problem = msgspec.json.decode(answer, type=Problem)
                raise (WrongState if problem.status == http.HTTPStatus.CONFLICT else Refused)(problem.detail)
        except msgspec.MsgspecError:
            pass
        raise Unreachable(f"what answers at {where} does not speak infd's admin protocol; {_START_OR_NAME}")


_START_OR_NAME = "start one with `infd start`, or name its socket with --socket or INFD_ADMIN_SOCKET"
