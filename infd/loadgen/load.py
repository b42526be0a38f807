"""Send a dataset's requests, at given times, to a server, and measure the answers."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import time
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, Protocol

import aiohttp
import msgspec
from msgspec import Struct

from infd.loadgen import arrivals, structured
from infd.loadgen.connections import Connections
from infd.loadgen.datasets import files, synthetic
from infd.loadgen.datasets.call import Block, Call, Outline
from infd.loadgen.datasets.spec import Synthetic
from infd.loadgen.figures import Drafts, Measured, Report, summarise
from infd.loadgen.pooling import OPERATIONS
from infd.loadgen.prompts import (
    ALL_WORDS,
    PROBES,
    IdWriter,
    TextWriter,
    WordCost,
    Writer,
    body_of,
    text_of_messages,
    words,
)
from infd.loadgen.samples import Failure, Sample
from infd.loadgen.server import DraftCounts, Server
from infd.loadgen.stream import RequestFailed, measure, read_document, read_events, text_of

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping, Sequence

    from infd.loadgen.settings import Settings
    from infd.loadgen.stream import Reader

_WRITERS: Final = 16  # prompts fitted at once
_CHARACTERS_A_TOKEN: Final = 4  # of recorded replies, where the server has no tokenizer
_WARMUP_TOKENS: Final = 32  # of a warm-up's prompt, where the dataset is a file


class Observer(Protocol):
    """Is notified of a run's progress."""

    def tell(self, text: str) -> None:
        """Show a message to the user."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` prompts are written (stage "prompts"), or requests have ended (stage "requests")."""


class Silent:
    """An observer that shows nothing."""

    def tell(self, text: str) -> None:
        pass

    def advance(self, stage: str, done: int, total: int) -> None:
        pass


class Job(Struct, frozen=True):
    """A request ready to send.

    schema  that the answer must fit; None: the answer is free
    tokens  of the prompt, where they are known
    reader  reads the answer
    """

    body: bytes
    url: str
    model: str
    schema: dict[str, Any] | None
    tokens: int
    reader: Reader = read_events


async def offer(
    settings: Settings, *, api_key: str = "", observer: Observer | None = None, keep_on_cancel: bool = False
) -> Report:
    """Run the load of `settings` once, and return the measurements. Raises as `connect` and `Generator.offer` do."""
    async with connect(settings, api_key=api_key, observer=observer) as generator:
        return await generator.offer(settings, keep_on_cancel=keep_on_cancel)


@asynccontextmanager
async def connect(
    settings: Settings,
    *,
    api_key: str = "",
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    patience_s: float = 0.0,
    observer: Observer | None = None,
) -> AsyncIterator[Generator]:
    """Wait until the server answers, learn its tokens, and yield a generator of loads for it.

    headers     sent with every request
    tls         context of TLS; None: aiohttp's
    patience_s  how long the server may take to become ready

    Raises RequestFailed.
    """
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    sent = {"Content-Type": "application/json", **(headers or {})}
    if api_key:
        sent["Authorization"] = f"Bearer {api_key}"
    connector = aiohttp.TCPConnector(limit=0, ssl=tls or True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        chat = settings.endpoint == "chat"
        server = Server(settings, session, sent)
        await server.ready({**settings.body, **_body(["ready"], settings, chat=chat)}, chat=chat, patience_s=patience_s)
        observer = observer or Silent()
        connections = Connections(settings.timeout_s, tls)
        try:
            yield Generator(server, connections, await _writer(server, settings, observer), observer)
        finally:
            connections.close()


def _variant(outline: Outline, number: int) -> Outline:
    """Return an outline of the same lengths, with other text in its last block."""
    *shared, own = outline.blocks
    return Outline((*shared, Block(f"{own.seed} {number}", own.tokens)))


def _body(prompts: Sequence[Any], settings: Settings, *, chat: bool) -> dict[str, Any]:
    """Return the fields of a request that hold its prompt, or its inputs."""
    if settings.task in OPERATIONS:
        return OPERATIONS[settings.task].body([text_of_messages(prompt) for prompt in prompts])
    return body_of(prompts[0], chat=chat)


async def _writer(server: Server, settings: Settings, observer: Observer) -> Writer:
    """Choose how prompts get their lengths: by ids, by texts that the server counts, or by the usage of probes."""
    chat = settings.endpoint == "chat"
    template = {"chat_template_kwargs": given} if (given := settings.body.get("chat_template_kwargs")) else {}

    async def count(text: str) -> int:
        plain = {"prompt": text, "add_special_tokens": False}
        asked = plain if settings.task in OPERATIONS else {**template, **body_of(text, chat=True)}
        found = await server.tokens(asked)
        if found is None:
            raise RequestFailed("no tokens", "POST /tokenize of messages")
        return len(found)

    pool = await server.tokens({"prompt": ALL_WORDS, "add_special_tokens": False}) if settings.exact else None
    if pool and not chat and settings.task != "rerank":
        return IdWriter(pool)
    rng = random.Random(f"probe {settings.seed}")  # noqa: S311 - reproducible, not secret
    probes = [words(rng, size) for size in PROBES]
    if pool:
        try:
            cost = WordCost.from_probes((await count(probes[0]), await count(probes[1])))
        except RequestFailed as failure:
            observer.tell(f"lengths of prompts are about right: the server counts no messages ({failure})")
        else:
            return TextWriter(cost, count)
    fields = {**settings.body, "model": server.model}
    first, second = [await server.usage({**fields, **_body([text], settings, chat=chat)}, chat=chat) for text in probes]
    if first is None or second is None:
        observer.tell("the server reports no usage: a word counts as one token")
        return TextWriter(WordCost(), None)
    return TextWriter(WordCost.from_probes((first.prompt_tokens, second.prompt_tokens)), None)


class Generator:
    """Offers loads to one server."""

    def __init__(self, server: Server, connections: Connections, writer: Writer, observer: Observer) -> None:
        self._server = server
        self._connections = connections
        self._writer = writer
        self._observer = observer

    async def offer(self, settings: Settings, *, keep_on_cancel: bool = False) -> Report:
        """Run one load, and return the measurements.

        keep_on_cancel  whether cancellation ends the measurement early; the report then covers the ended requests

        Raises RequestFailed if a warm-up request fails; the report counts later failures. Raises DatasetError.
        """
        self._writer.lengths.inexact = 0
        warmups, calls = _calls(settings)
        for job in await self._write(warmups, settings):
            headers, now = self._server.headers, time.perf_counter()
            await measure(self._connections, job.url, job.body, headers, now, reader=job.reader)
        # Bodies are built before the measurement, so that during it the generator only sends and reads.
        jobs = await self._write(calls, settings)
        self._observer.tell(f"{len(jobs)} requests to {jobs[0].url}, model {self._server.model}")
        started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        before = await self._server.drafts()
        run = _Run(settings, self._connections, self._server.headers, self._observer)
        await run.send_all(jobs, _due_times(settings, calls), keep_on_cancel=keep_on_cancel)
        measured = run.measured
        measured.drafts = _drafts(before, await self._server.drafts())
        if any(isinstance(call.prompt, Outline) for call in calls):
            measured.lengths, measured.inexact = self._writer.lengths.by, self._writer.lengths.inexact
        return summarise(settings, self._server.model, started, measured)

    async def _write(self, calls: Sequence[Call], settings: Settings) -> list[Job]:
        jobs: dict[int, Job] = {}
        models = _assigned(settings, self._server.model, len(calls))
        waiting = iter(enumerate(calls))

        async def write() -> None:
            for number, call in waiting:
                jobs[number] = await self._job(call, models[number], settings)
                self._observer.advance("prompts", len(jobs), len(calls))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(_WRITERS):
                    group.create_task(write())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [jobs[number] for number in range(len(calls))]

    async def _job(self, call: Call, model: str, settings: Settings) -> Job:
        if settings.task in OPERATIONS:
            return await self._pooled_job(call, model, settings)
        chat = (call.endpoint or settings.endpoint) == "chat"
        body: dict[str, Any] = dict(call.body)
        tokens = 0
        if isinstance(call.prompt, Outline):
            tokens = call.prompt.tokens
            body |= body_of(await self._writer.write(call.prompt, settings.seed), chat=chat)
        elif call.prompt is not None:
            body |= body_of(call.prompt, chat=chat)
        length = call.output_tokens or await self._reply_tokens(call.reply)
        if length:
            for name in ("max_completion_tokens", "max_tokens"):
                body.pop(name, None)
            body["max_tokens"] = length
        body |= {"model": model, "stream": True, "stream_options": {"include_usage": True}} | settings.body
        url = self._server.url(chat=chat)
        return Job(msgspec.json.encode(body), url, model, structured.wanted(body), tokens)

    async def _pooled_job(self, call: Call, model: str, settings: Settings) -> Job:
        """Return a request whose inputs are variants of the call's outline, or its text."""
        prompts: list[Any] = [call.prompt]
        tokens = 0
        if isinstance(call.prompt, Outline):
            outlines = [_variant(call.prompt, number) for number in range(settings.inputs)]
            prompts = [await self._writer.write(outline, settings.seed) for outline in outlines]
            tokens = call.prompt.tokens * settings.inputs
        body = {**call.body, **_body(prompts, settings, chat=False), "model": model} | settings.body
        return Job(msgspec.json.encode(body), self._server.url(chat=False), model, None, tokens, read_document)

    async def _reply_tokens(self, reply: str) -> int:
        if not reply:
            return 0
        found = await self._server.tokens({"prompt": reply, "add_special_tokens": False})
        return max(1, len(reply) // _CHARACTERS_A_TOKEN if found is None else len(found))


class _Run:
    """One measurement: from the first request sent to the last answer's end."""

    def __init__(
        self, settings: Settings, connections: Connections, headers: Mapping[str, str], observer: Observer
    ) -> None:
        self.measured = Measured()
        self._settings = settings
        self._connections = connections
        self._headers = headers
        self._observer = observer
        self._in_flight = 0
        self._kinds: set[str] = set()

    async def send_all(self, jobs: Sequence[Job], due_s: Sequence[float] | None, *, keep_on_cancel: bool) -> None:
        """Send each job when it is due; without due times, when `concurrency` allows."""
        measured, cap = self.measured, self._settings.concurrency
        gate = asyncio.Semaphore(cap) if cap is not None else nullcontext()
        begun = time.perf_counter()

        async def send(job: Job, due: float | None) -> None:
            async with gate:
                await self._send(job, begun, time.perf_counter() if due is None else due)
                self._observer.advance("requests", len(measured.samples) + len(measured.failures), len(jobs))

        try:
            async with asyncio.TaskGroup() as group:
                for number, job in enumerate(jobs):
                    due = None if due_s is None else begun + due_s[number]
                    if due is not None:
                        await asyncio.sleep(due - time.perf_counter())
                    group.create_task(send(job, due))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not keep_on_cancel or task is None:
                raise
            task.uncancel()
            measured.interrupted = True
        measured.duration_s = time.perf_counter() - begun

    async def _send(self, job: Job, begun: float, due: float) -> None:
        measured = self.measured
        lines: list[bytes] | None = None if job.schema is None else []
        self._in_flight += 1
        measured.unfinished += 1
        measured.peak_in_flight = max(measured.peak_in_flight, self._in_flight)
        try:
            sample = await measure(self._connections, job.url, job.body, self._headers, due, lines, reader=job.reader)
            measured.samples.append(_judged(sample, job, due - begun, lines))
        except RequestFailed as failure:
            if failure.kind not in self._kinds:
                self._kinds.add(failure.kind)
                self._observer.tell(f"first failure of its kind: {failure}")
            e2e_s = time.perf_counter() - due
            measured.failures.append(Failure(kind=failure.kind, due_s=due - begun, e2e_s=e2e_s, model=job.model))
        finally:
            self._in_flight -= 1
        measured.unfinished -= 1  # not if cancelled: that request stays unfinished


def _judged(sample: Sample, job: Job, due_s: float, lines: list[bytes] | None) -> Sample:
    """Return the sample, with the job's model and the verdict on its answer. Raises RequestFailed."""
    sample.due_s, sample.model = due_s, job.model
    sample.input_tokens = sample.input_tokens if sample.counted else job.tokens
    if job.schema is not None and lines is not None:
        sample.schema = True
        sample.valid = None if sample.finish == "length" else structured.fits(text_of(lines), job.schema)
    return sample


def _calls(settings: Settings) -> tuple[list[Call], list[Call]]:
    """Return the warm-up's requests and the measured ones."""
    spec, seed = settings.dataset, settings.seed
    if isinstance(spec, Synthetic):
        made = synthetic.calls(spec, settings.warmup + settings.requests, seed)
        return made[: settings.warmup], made[settings.warmup :]
    outlines = [Outline((Block(f"warm-up {number}", _WARMUP_TOKENS),)) for number in range(settings.warmup)]
    warmups = [Call(prompt=outline, output_tokens=_WARMUP_TOKENS) for outline in outlines]
    return warmups, files.calls(spec, settings.requests, seed)


def _due_times(settings: Settings, calls: Sequence[Call]) -> list[float] | None:
    """Return when each request is due; None: when `concurrency` allows."""
    if settings.request_rate is not None:
        return arrivals.arrivals(settings.request_rate, settings.burstiness, len(calls), settings.seed)
    times_s = [call.at_s for call in calls if call.at_s is not None]
    if isinstance(settings.dataset, Synthetic) or len(times_s) < len(calls):
        return None
    return arrivals.replayed(times_s, settings.dataset.time_scale)


def _assigned(settings: Settings, model: str, count: int) -> list[str]:
    """Return the model of each request."""
    names = list(settings.models) or [model]
    if settings.assignment == "round-robin":
        return [names[number % len(names)] for number in range(count)]
    rng = random.Random(f"models {settings.seed}")  # noqa: S311 - reproducible, not secret
    return rng.choices(names, weights=list(settings.models.values()) or None, k=count)


def _drafts(before: DraftCounts | None, after: DraftCounts | None) -> Drafts | None:
    """Return the drafts between two readings of the counters; None if there were none."""
    if after is None:
        return None
    before = before or DraftCounts()
    drafts, drafted = after.drafts - before.drafts, after.drafted - before.drafted
    accepted = after.accepted - before.accepted
    if drafts <= 0 or drafted <= 0:
        return None
    places = sorted(after.by_position, key=int)
    shares = [(after.by_position[place] - before.by_position.get(place, 0.0)) / drafts for place in places]
    return Drafts(
        drafts=int(drafts),
        drafted_tokens=int(drafted),
        accepted_tokens=int(accepted),
        acceptance=accepted / drafted,
        step_tokens=1 + accepted / drafts,
        by_position=shares,
    )
