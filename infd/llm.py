"""`infd.LLM`: a model in this process, for notebooks and evaluation. Requests are those of the HTTP API."""

from __future__ import annotations

import asyncio
import difflib
import gc
import os
import sys
import threading
import weakref
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import uvloop
from msgspec import Struct

from infd.batch.progress import BatchProgress
from infd.config import SETTINGS, Assignment, Environment, LiveConfig, limit_thread_spinning, load
from infd.daemon.local_model import LocalModel, cause
from infd.daemon.progress import Stage
from infd.engine.lifecycle.state import State
from infd.errors import InvalidRequest, NotReady, Overloaded, ServerStopped
from infd.http.apis.api import PoolingApi
from infd.http.apis.chat import CHAT
from infd.http.apis.completions import COMPLETIONS
from infd.http.apis.embeddings import CLASSIFY, EMBEDDINGS
from infd.http.apis.score import SCORE
from infd.http.backend import Backend
from infd.http.exchange import Exchange
from infd.http.generate import generate
from infd.http.json_body import decode
from infd.http.pieces import batched
from infd.http.pooling.pool import pool
from infd.http.schema.chat import ChatResponse
from infd.http.schema.completions import CompletionResponse
from infd.http.schema.pooling import ClassifyResponse, EmbeddingResponse, PromptUsage
from infd.http.schema.scoring import ScoreResponse
from infd.http.schema.usage import Usage
from infd.offload import QUICK_SWITCHES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
    from types import TracebackType

    from infd.config import Config
    from infd.http.apis.api import Api
    from infd.http.schema.pooling import Classification

    AnyApi = Api[Any] | PoolingApi[Any]
    Prompt = str | Sequence[int]
    Messages = Sequence[dict[str, Any]]

T = TypeVar("T")
Answered = TypeVar("Answered", ChatResponse, CompletionResponse, EmbeddingResponse, ClassifyResponse, ScoreResponse)

# Requests in flight for each sequence of a step, so that a prompt waits whenever a sequence ends.
IN_FLIGHT_PER_ROW: Final = 2
# Inputs of one request for embeddings, labels or scores.
INPUTS: Final = 64
CLOSING_S: Final = 10.0
RETRY_S: Final = 0.02  # after a request found the queue full
# The settings by the names that `LLM` accepts: a flag's, such as max_model_len, or section__key, such as cache__bytes.
_KEYWORDS: Final = {key.replace(".", "__"): key for key in SETTINGS} | {
    flag.removeprefix("--").replace("-", "_"): key
    for key, setting in SETTINGS.items()
    for flag in (setting.flag, setting.alias)
    if flag is not None and not setting.switch
}


class LLM:
    """A model with infd's engine, on an event loop in a thread of its own.

    Answers equal those of `infd start` with the same settings. Every thread may call the methods. Use as a context
    manager, or call `close`; otherwise the model is released with the object, or at the interpreter's exit.

    While a model is open, the interpreter's switch interval is at most 0.5 ms: its threads take turns for a step's many
    short calls, and with Python's 5 ms a step would wait whole milliseconds for another thread. Variables of the
    environment that limit the threads of OpenMP, OpenBLAS and tokenizers are set, and stay so, unless they already are.
    """

    def __init__(self, model: str = "embedded", *, config: str | Path | None = None, **settings: Any) -> None:
        """Load a model; return once it is ready.

        model     as `infd start --model`: a checkpoint directory, a GGUF file, a hub id, or "embedded"
        config    a TOML file of settings; files in /etc and INFD_ variables are not read
        settings  flags of `infd start`, such as max_model_len=4096, or section__key, such as scheduler__step_tokens=512

        Raises StartError: ConfigError for wrong settings, CheckpointError for a model that infd cannot serve.
        """
        limit_thread_spinning(os.environ)
        loaded = load(
            file=Path(os.devnull if config is None else config),
            command_line=[_assignment(name, value) for name, value in {"model": model, **settings}.items()],
        )
        found = Environment.read(os.environ, pid=os.getpid(), uid=os.geteuid())
        environment = Environment(hub=found.hub, cache=found.cache)
        self._server = _Server(loaded.config, environment)
        self._finalizer = weakref.finalize(self, self._server.close)
        try:
            self._server.ready.result()
        except BaseException:
            self.close()
            raise

    def generate(
        self, prompts: Prompt | Iterable[Prompt], *, progress: bool = False, **fields: Any
    ) -> list[CompletionResponse]:
        """Complete texts or lists of token ids: return an answer to each prompt, in order.

        fields    of POST /v1/completions, such as max_tokens=64, temperature=0, or return_token_ids=True
        progress  whether to draw a progress bar on standard error

        Raises RequestError for the first request that fails, and ends the others.
        """
        bodies = [{"prompt": prompt, **fields} for prompt in _listed(prompts)]
        _check_fields(fields, COMPLETIONS)
        return self._answer(COMPLETIONS, bodies, CompletionResponse, progress=progress)

    def chat(
        self, conversations: Messages | Iterable[Messages], *, progress: bool = False, **fields: Any
    ) -> list[ChatResponse]:
        """Answer conversations: return an answer to each, in order.

        conversations  one list of messages, or several
        fields         of POST /v1/chat/completions, such as tools, response_format or reasoning_effort
        progress       whether to draw a progress bar on standard error

        Raises RequestError for the first request that fails, and ends the others.
        """
        found: list[Any] = list(conversations)
        if found and isinstance(found[0], dict):
            found = [found]
        bodies = [{"messages": messages, **fields} for messages in found]
        _check_fields(fields, CHAT)
        return self._answer(CHAT, bodies, ChatResponse, progress=progress)

    def embed(self, inputs: Prompt | Iterable[Prompt], *, progress: bool = False, **fields: Any) -> list[list[float]]:
        """Return the embedding of each text, or list of token ids, in order.

        fields    of POST /v1/embeddings, such as dimensions=256, prompt_name="query" or truncate_prompt_tokens=-1
        progress  whether to draw a progress bar on standard error, which counts requests of INPUTS inputs

        Raises RequestError for the first request that fails, and ends the others.
        """
        _check_fields(fields, EMBEDDINGS)
        bodies = [{"input": part, **fields, "encoding_format": "float"} for part in batched(_listed(inputs), INPUTS)]
        answers = self._answer(EMBEDDINGS, bodies, EmbeddingResponse, progress=progress)
        return [each.embedding for answer in answers for each in answer.data if not isinstance(each.embedding, str)]

    def classify(
        self, inputs: Prompt | Iterable[Prompt], *, progress: bool = False, **fields: Any
    ) -> list[Classification]:
        """Return the scores of the labels of each text, or list of token ids, in order.

        fields    of POST /classify, such as use_activation=False
        progress  as of `embed`

        Raises RequestError for the first request that fails, and ends the others.
        """
        _check_fields(fields, CLASSIFY)
        bodies = [{"input": part, **fields} for part in batched(_listed(inputs), INPUTS)]
        answers = self._answer(CLASSIFY, bodies, ClassifyResponse, progress=progress)
        return [each for answer in answers for each in answer.data]

    def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], *, progress: bool = False, **fields: Any
    ) -> list[float]:
        """Return the score of each document beside the query, or beside the query with the same number.

        fields    of POST /score, such as max_tokens_per_doc=256
        progress  as of `embed`

        Raises RequestError for the first request that fails, and ends the others.
        """
        _check_fields(fields, SCORE)
        texts = [documents] if isinstance(documents, str) else list(documents)
        if isinstance(queries, str):
            bodies = [{"queries": queries, "documents": part, **fields} for part in batched(texts, INPUTS)]
        elif len(queries) != len(texts):
            raise InvalidRequest(f"{len(queries)} queries beside {len(texts)} documents", param="queries")
        else:
            pairs = zip(batched(queries, INPUTS), batched(texts, INPUTS), strict=True)
            bodies = [{"queries": asked, "documents": part, **fields} for asked, part in pairs]
        answers = self._answer(SCORE, bodies, ScoreResponse, progress=progress)
        return [each.score for answer in answers for each in answer.data]

    def close(self) -> None:
        """Release the model. Requests in flight fail with ServerStopped; later ones too."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _answer(
        self, api: AnyApi, bodies: list[dict[str, Any]], kind: type[Answered], *, progress: bool
    ) -> list[Answered]:
        shown = BatchProgress(len(bodies), 0, draws=progress and sys.stderr.isatty())
        try:
            answers = self._server.run(self._server.answer_all(api, bodies, kind, shown))
        except BaseException:
            shown.close(failed=1)
            raise
        shown.close(failed=0)
        return answers


def _assignment(name: str, value: object) -> Assignment:
    key = _KEYWORDS.get(name, name.replace("__", "."))
    return Assignment(key, value, f"LLM({name}=...)", text=isinstance(value, str))


def _listed(prompts: Prompt | Iterable[Prompt]) -> list[Any]:
    """Return a list of prompts, given one prompt or several."""
    found: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    return [found] if found and isinstance(found[0], int) else found


def _check_fields(names: Iterable[str], api: AnyApi) -> None:
    """Raise InvalidRequest for a field that the API does not have, which a server would ignore."""
    known = [field.encode_name for field in msgspec.structs.fields(api.decoder.type)]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise InvalidRequest(f"unknown field {name}; the nearest known one is {near[0]}", param=name)


def _tokens(answer: Struct) -> int:
    """Return the number of generated tokens; of embeddings, labels and scores the tokens of the inputs."""
    usage = getattr(answer, "usage", None)
    if isinstance(usage, PromptUsage):
        return usage.prompt_tokens
    return usage.completion_tokens if isinstance(usage, Usage) else 0


class _Server:
    """The model, its backend, and the thread that runs their event loop.

    ready  has a result once the model is loaded, or the error that prevented it
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        self.ready: Future[None] = Future()
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._closed = False  # set with `_stop`, also before there is a loop
        self._ended: BaseException | None = None
        self._rows = 1
        self._backend: Backend | None = None
        self._lock = threading.Lock()  # of the next two
        self._over = False  # whether the loop runs nothing any more
        self._asked: dict[Future[Any], Coroutine[Any, Any, Any]] = {}  # work that has no result yet
        self._thread = threading.Thread(target=self._run, args=(environment,), name="infd-llm", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result. If the caller is interrupted, cancel the coroutine."""
        with self._lock:
            try:
                if self._loop is None or self._over:
                    raise RuntimeError
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:  # the loop has just closed, or there is none
                work.close()
                raise ServerStopped from self._ended
            self._asked[future] = work
        future.add_done_callback(self._asked.pop)
        try:
            return future.result()
        except CancelledError:
            raise ServerStopped from self._ended
        except BaseException:
            future.cancel()
            raise

    async def answer_all(
        self, api: AnyApi, bodies: list[dict[str, Any]], kind: type[Answered], progress: BatchProgress
    ) -> list[Answered]:
        """Return the answers to requests, in order. Raises RequestError, after all other requests have ended."""
        answers: dict[int, Answered] = {}
        waiting = iter(enumerate(bodies))

        async def work() -> None:
            for number, body in waiting:
                answers[number] = await self._answer(api, body, kind)
                progress.add(_tokens(answers[number]))

        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(len(bodies), IN_FLIGHT_PER_ROW * self._rows)):
                    tasks.create_task(work())
        except BaseExceptionGroup as group:
            raise cause(group) from None
        return [answers[number] for number in range(len(bodies))]

    async def _answer(self, api: AnyApi, fields: dict[str, Any], kind: type[Answered]) -> Answered:
        assert self._backend is not None
        try:
            body = msgspec.json.encode(fields)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"the request is no JSON: {error}") from None
        request, backend, size = decode(body, api.decoder, self._config.limits.json_depth), self._backend, len(body)
        if getattr(request, "stream", False):
            raise InvalidRequest("stream is not for LLM, which returns whole answers", param="stream")
        work: Callable[[], Awaitable[Iterable[bytes]]]
        if isinstance(api, PoolingApi):
            pooling = api.pooling(request, size, backend.model(), self._config)
            work = partial(pool, pooling, partial(api.body, request), Exchange(), backend)
        else:
            generation = api.generation(request, size, self._config)
            work = partial(generate, generation, partial(api.format, request), Exchange(), backend)
        return msgspec.json.decode(b"".join(await self._when_admitted(work, backend)), type=kind)

    async def _when_admitted(self, work: Callable[[], Awaitable[Iterable[bytes]]], backend: Backend) -> Iterable[bytes]:
        """Answer a request; if other calls have filled the queue, wait. Raises RequestError."""
        while True:
            try:
                return await work()
            except NotReady:
                if self._stop.is_set():
                    raise ServerStopped from None
                raise
            except Overloaded:
                if not backend.engine.status().tickets:
                    raise
            await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """End all requests and release the model. On the loop's own thread, return without waiting."""
        self._closed = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(self._stop.set)
            if threading.current_thread() is not self._thread:
                self._thread.join(CLOSING_S)

    def _run(self, environment: Environment) -> None:
        try:
            with QUICK_SWITCHES, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve(environment))
        except BaseException as error:
            self._ended = cause(error) if isinstance(error, BaseExceptionGroup) else error
            if not self.ready.done():
                self.ready.set_exception(self._ended)
        with self._lock:
            self._over = True
            asked = dict(self._asked)
        for future, work in asked.items():  # that the loop took without running it, as it ended
            if future.cancel():
                work.close()
        gc.collect()  # the weights, if cycles refer to them

    async def _serve(self, environment: Environment) -> None:
        live = LiveConfig(self._config)
        model = LocalModel(live, environment, stage=lambda name: Stage(name, None))
        try:
            served, capacity = await model.load()
            if self._closed:
                raise ServerStopped
            self._backend = Backend(model.engine, live, model.offload)
            self._backend.served, self._rows = served, capacity.rows
            async with asyncio.TaskGroup() as tasks:
                engine = tasks.create_task(model.engine.run(), name="engine")
                await asyncio.sleep(0)  # the engine's task begins, and the engine is ready
                model.serve_grammars()
                self.ready.set_result(None)
                await self._stop.wait()
                model.engine.lifecycle.enter(State.DRAINING, "closed")
                model.engine.fail_all(ServerStopped())
                engine.cancel()
        finally:
            await model.close()
            model.release()
