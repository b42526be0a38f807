"""Send the lines of a batch to a daemon in this process, and write the answers."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import aiohttp
import msgspec
from msgspec import Struct

from infd.batch import lines
from infd.batch.files import survey, unanswered
from infd.batch.progress import BatchProgress
from infd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from infd.batch.files import Output
    from infd.config import Config, Environment

# Requests in flight for each row (a sequence in a step), so that a prompt waits whenever a row becomes free.
IN_FLIGHT_PER_ROW: Final = 2
# Statuses after which a request is sent again: the queue is full, or the server is paused, asleep or draining.
RETRIED: Final = frozenset({429, 503})
LONGEST_DELAY_S: Final = 30
SUCCESS: Final = 200
INTERNAL_ERROR: Final = 500
# Delay before an internal error is recorded. If the device was lost, the process ends within this time, and a later run
# sends the request again.
LOSS_S: Final = 1.0
EX_STOPPED: Final = os.EX_TEMPFAIL  # 75


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Counted(Struct):
    usage: _Usage | None = None


class Batch:
    """One run over an input: every line without a record in the output is sent, and its answer is appended.

    concurrency  requests in flight; None: as many as keep the device busy
    """

    def __init__(self, source: Path, output: Output, concurrency: int | None, *, draws: bool) -> None:
        """Read both files. Raises UsageError, InputMalformed."""
        self._output = output
        self._concurrency = concurrency
        found = survey(source, output)
        self._total, self._duplicates = found.lines, found.duplicates
        self._draws = draws
        self._lines: Iterator[tuple[int, bytes]] = unanswered(source, output)

    @property
    def finished(self) -> bool:
        """Whether every line has a record."""
        return len(self._output.done) == self._total

    @property
    def exit_code(self) -> int:
        if not self.finished:
            return EX_STOPPED
        return os.EX_DATAERR if self._output.failed else os.EX_OK

    async def __call__(self, address: str, rows: int, stopping: asyncio.Event) -> int:
        """Send the requests to the server. Return the exit code.

        address   unix:PATH
        rows      sequences that the device computes at once
        stopping  set when the server no longer admits requests; requests in flight are awaited
        """
        progress = BatchProgress(self._total, len(self._output.done), draws=self._draws)
        try:
            async with (
                aiohttp.ClientSession(
                    "http://batch",
                    connector=aiohttp.UnixConnector(address.removeprefix("unix:"), limit=0),
                    timeout=aiohttp.ClientTimeout(total=None),
                    headers={"Content-Type": "application/json"},
                ) as session,
                asyncio.TaskGroup() as tasks,
            ):
                for _ in range(self._concurrency or IN_FLIGHT_PER_ROW * rows):
                    tasks.create_task(self._work(session, progress, stopping), name="batch")
        finally:
            progress.close(failed=self._output.failed)
            self._output.close()
        return self.exit_code

    async def _work(self, session: aiohttp.ClientSession, progress: BatchProgress, stopping: asyncio.Event) -> None:
        while not stopping.is_set() and (line := next(self._lines, None)) is not None:
            number, text = line
            try:
                request = lines.parse(text)
                if number in self._duplicates:
                    raise InvalidRequest(f"line {self._duplicates[number]} has the same custom_id", param="custom_id")
            except InvalidRequest as error:
                self._output.append(lines.refused(number, lines.custom_id(text), error), number, failed=True)
                progress.add(0)
                continue
            answer = await _answer(session, request, stopping)
            if answer is None:
                return
            record = lines.answered(number, request.custom_id, answer.status, answer.request_id, answer.body)
            self._output.append(record, number, failed=answer.status != SUCCESS)
            progress.add(answer.tokens)


class _Answer(Struct, frozen=True):
    status: int
    request_id: str
    body: bytes

    @property
    def tokens(self) -> int:
        """Generated tokens; of embeddings, labels and scores the tokens of the inputs."""
        try:
            usage = msgspec.json.decode(self.body, type=_Counted).usage
        except msgspec.MsgspecError:
            return 0
        if usage is None:
            return 0
        if usage.completion_tokens is None and usage.output_tokens is None:
            return usage.prompt_tokens
        return (usage.completion_tokens or 0) + (usage.output_tokens or 0)


async def _answer(session: aiohttp.ClientSession, request: lines.Request, stopping: asyncio.Event) -> _Answer | None:
    """Send a request until it is answered. Return None if the server stops before."""
    delay_s = 1
    while True:
        try:
            async with session.post(request.url, data=bytes(request.body)) as response:
                answer = _Answer(response.status, response.headers.get("X-Request-Id", ""), await response.read())
        except aiohttp.ClientError:
            answer = None  # the server has closed its socket
        if answer is not None and answer.status == INTERNAL_ERROR:
            await asyncio.sleep(LOSS_S)
        if answer is not None and answer.status not in RETRIED:
            return answer
        if stopping.is_set():
            return None
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), delay_s)
        delay_s = min(2 * delay_s, LONGEST_DELAY_S)


def settings(config: Config, environment: Environment, directory: Path) -> tuple[Config, Environment]:
    """Return the settings of a daemon that only this process can reach.

    directory  for the sockets; the settings may name another admin socket
    """
    server = msgspec.structs.replace(
        config.server, host=(f"unix:{directory / 'http.sock'}",), unix_mode="0600", api_key_file="", idle_sleep_s=None
    )
    log = msgspec.structs.replace(config.log, access=False)  # the output has a line for each request
    admin = msgspec.structs.replace(config.admin, socket=config.admin.socket or str(directory / "admin.sock"))
    return (
        msgspec.structs.replace(config, server=server, admin=admin, log=log),
        msgspec.structs.replace(environment, api_key="", credentials=None, inherited=0),
    )
