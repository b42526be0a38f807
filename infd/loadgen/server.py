"""The server under load: its routes, model names, tokenizer, and counters of drafts."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct

from infd.loadgen.pooling import OPERATIONS
from infd.loadgen.stream import RequestFailed, Usage, not_connected, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.loadgen.settings import Settings

T = TypeVar("T")

_POLL_S: Final = 0.2
_NOT_READY: Final = ("unreachable", "disconnected", "timeout")
_DRAFTS = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?(\{[^}]*\})? (\S+)",
    re.MULTILINE,
)


class _Listed(Struct):
    id: str


class _Models(Struct):
    data: Annotated[list[_Listed], Meta(min_length=1)]


class _Answer(Struct):
    usage: Usage | None = None


class _Tokens(Struct):
    tokens: list[int]


class DraftCounts(Struct, frozen=True):
    """Counters of speculative decoding since the server's start: of drafts, and of their tokens."""

    drafts: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    by_position: dict[str, float] = {}


class Server:
    """An OpenAI-compatible server. All methods raise RequestFailed, unless their text says otherwise."""

    def __init__(self, settings: Settings, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self._session = session
        self.headers = headers
        self._root = settings.url.rstrip("/").removesuffix("/v1")
        self.model = settings.model
        self._task = settings.task

    def url(self, *, chat: bool) -> str:
        if self._task in OPERATIONS:
            return self._root + OPERATIONS[self._task].path
        return self._root + ("/v1/chat/completions" if chat else "/v1/completions")

    async def ready(self, body: Mapping[str, Any], *, chat: bool, patience_s: float) -> None:
        """Return once the server has named its model, unless it is known, and answered a request of one token.

        patience_s  how long to ask again while the server is unreachable or says that it is not ready
        """
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if not self.model:
                    self.model = (await self._fetch("GET", "/v1/models", None, _Models)).data[0].id
                await self.usage({**body, "model": self.model}, chat=chat)
            except RequestFailed as failure:
                waits = failure.kind in _NOT_READY or failure.status in {502, 503}
                if not waits or time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_POLL_S)
            else:
                return

    async def usage(self, body: Mapping[str, Any], *, chat: bool) -> Usage | None:
        """Return the usage of a request of one token, answered whole; None if the server reports none."""
        path = self.url(chat=chat).removeprefix(self._root)
        short = {name: value for name, value in body.items() if name not in {"min_tokens", "stream", "stream_options"}}
        if self._task not in OPERATIONS:
            short["max_tokens"] = 1
        return (await self._fetch("POST", path, msgspec.json.encode(short), _Answer)).usage

    async def tokens(self, fields: Mapping[str, Any]) -> list[int] | None:
        """Return the token ids of a prompt or of messages; None if the server has no POST /tokenize as vLLM's."""
        body = msgspec.json.encode({"model": self.model, **fields})
        try:
            return (await self._fetch("POST", "/tokenize", body, _Tokens)).tokens
        except RequestFailed as failure:
            if failure.status in {404, 405, 501} or failure.kind == "no OpenAI endpoint":
                return None
            raise

    async def drafts(self) -> DraftCounts | None:
        """Return the counters of speculative decoding among the server's metrics; None if there are none."""
        try:
            async with self._session.get(f"{self._root}/metrics", headers=self.headers) as response:
                text = (await response.read()).decode(errors="replace") if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return None
        totals: dict[str, float] = {}
        by_position: dict[str, float] = {}
        for name, labels, value in _DRAFTS.findall(text):
            if name == "accepted_tokens_per_pos":
                place = re.search(r'position="(\d+)"', labels)
                key = place[1] if place else "0"
                by_position[key] = by_position.get(key, 0.0) + float(value)
            else:
                totals[name] = totals.get(name, 0.0) + float(value)
        if not totals:
            return None
        get = totals.get
        return DraftCounts(get("drafts", 0.0), get("draft_tokens", 0.0), get("accepted_tokens", 0.0), by_position)

    async def _fetch(self, method: str, path: str, body: bytes | None, kind: type[T]) -> T:
        url = self._root + path
        try:
            async with self._session.request(method, url, data=body, headers=self.headers) as response:
                answer = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise not_connected(error, url) from None
        except TimeoutError:
            raise RequestFailed("unreachable", f"{url}: no answer in time") from None
        except aiohttp.ServerDisconnectedError:
            advice = (
                "if it speaks TLS, write https:// in --url"
                if url.startswith("http:")
                else "if it asks for a client's certificate, give one with --cert and --key"
            )
            raise RequestFailed("disconnected", f"{url}: the server closed the connection; {advice}") from None
        except aiohttp.ClientError as error:
            raise RequestFailed("disconnected", f"{url}: {error!r}") from None
        if response.status != 200:
            raise refusal(response.status, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestFailed("no OpenAI endpoint", f"{url}: {error}") from None
