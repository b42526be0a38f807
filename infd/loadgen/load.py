"""Send requests of given sizes, at given times, to an endpoint, and measure the answers."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import time
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct

from infd.loadgen import figures, prompts
from infd.loadgen.stream import RequestFailed, Usage, cause, measure, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.loadgen.figures import Report, Sample
    from infd.loadgen.settings import Settings

T = TypeVar("T")


class _Listed(Struct):
    id: str


class _Models(Struct):
    data: Annotated[list[_Listed], Meta(min_length=1)]


class _Answer(Struct):
    usage: Usage | None = None


async def offer(settings: Settings, *, api_key: str = "", notify: Callable[[str], None] = lambda text: None) -> Report:
    """Run the load of `settings`, and return the measurements.

    notify  receives progress messages for people

    Raises RequestFailed if listing models, a probe or a warm-up request fails; the report counts later failures.
    """
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        return await _Run(settings, session, headers, notify).measure()


class _Run:
    def __init__(
        self, settings: Settings, session: aiohttp.ClientSession, headers: dict[str, str], notify: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._session = session
        self._headers = headers
        self._notify = notify
        self._base = settings.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = self._base + ("/chat/completions" if settings.endpoint == "chat" else "/completions")
        self._model = settings.model

    async def measure(self) -> Report:
        settings = self._settings
        if not self._model:
            self._model = (await self._fetch("GET", f"{self._base}/models", None, _Models)).data[0].id
        cost = await self._word_cost()
        length = cost.words(settings.input_tokens)
        supply = prompts.Prompts(settings.prompts, length, settings.seed, shared=settings.shared)
        for _ in range(settings.warmup):
            await measure(self._session, self._url, self._body(supply.take()), self._headers, time.perf_counter())
        # Bodies are built before the measurement, so that during it the generator only sends and reads.
        bodies = [self._body(supply.take()) for _ in range(settings.requests)]
        self._notify(f"{settings.requests} requests to {self._url}, model {self._model}")
        started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        begun = time.perf_counter()
        samples, errors = await self._send_all(bodies, begun)
        return figures.summarise(
            settings, self._model, started, time.perf_counter() - begun, samples, dict(errors.most_common())
        )

    async def _send_all(self, bodies: list[bytes], begun: float) -> tuple[list[Sample], Counter[str]]:
        samples: list[Sample] = []
        errors: Counter[str] = Counter()
        cap = self._settings.concurrency
        in_flight = asyncio.Semaphore(cap) if cap is not None else nullcontext()

        async def send(body: bytes, due: float | None) -> None:
            async with in_flight:
                try:
                    start = time.perf_counter() if due is None else due
                    samples.append(await measure(self._session, self._url, body, self._headers, start))
                except RequestFailed as failure:
                    if failure.kind not in errors:
                        self._notify(f"first failure of its kind: {failure}")
                    errors[failure.kind] += 1

        async with asyncio.TaskGroup() as group:
            for body, due in zip(bodies, self._due_times(begun), strict=False):
                if due is not None:
                    await asyncio.sleep(due - time.perf_counter())
                group.create_task(send(body, due))
        return samples, errors

    def _due_times(self, begun: float) -> Iterator[float | None]:
        rate = self._settings.request_rate
        rng = random.Random(self._settings.seed)  # noqa: S311 - reproducible, not secret
        due = begun
        while True:
            yield due if rate is not None else None
            if rate is not None:
                due += rng.expovariate(rate)

    async def _word_cost(self) -> prompts.WordCost:
        rng = random.Random(f"probe {self._settings.seed}")  # noqa: S311 - reproducible, not secret
        counts = []
        for size in prompts.PROBES:
            body = self._body(prompts.words(rng, size), max_tokens=1, stream=False)
            usage = (await self._fetch("POST", self._url, body, _Answer)).usage
            if usage is None:
                self._notify("the server reports no usage: a word counts as one token")
                return prompts.WordCost()
            counts.append(usage.prompt_tokens)
        return prompts.WordCost.from_probes((counts[0], counts[1]))

    def _body(self, prompt: str, *, max_tokens: int | None = None, stream: bool = True) -> bytes:
        settings = self._settings
        body: dict[str, Any] = {"model": self._model, "max_tokens": max_tokens or settings.output_tokens}
        if settings.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if stream:
            body["stream"] = True
            body["stream_options"] = {"include_usage": True}
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        return msgspec.json.encode(body | settings.body)

    async def _fetch(self, method: str, url: str, body: bytes | None, kind: type[T]) -> T:
        try:
            async with self._session.request(method, url, data=body, headers=self._headers) as response:
                answer = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("unreachable", f"{url}: {cause(error)}") from None
        except TimeoutError:
            raise RequestFailed("unreachable", f"{url}: no answer in time") from None
        except aiohttp.ClientError as error:
            raise RequestFailed("disconnected", f"{url}: {error!r}") from None
        if response.status != 200:
            raise refusal(response.status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestFailed("no OpenAI endpoint", f"{url}: {error}") from None
