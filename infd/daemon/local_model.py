"""A model with its engine in this process: the components that need no socket, and the order in which they load."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from infd.apart.client import Worker
from infd.daemon import components, resolve
from infd.drafting.select import drafting
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.errors import AdapterExists, AdapterTooLarge, ConfigError, StartError
from infd.grammar.select import trial_of
from infd.grammar.service import GrammarService
from infd.hub.fetch import fetch
from infd.offload import Offload
from infd.telemetry.metrics import Metrics
from infd.text import apart

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from infd.config import Environment, LiveConfig
    from infd.daemon.progress import Stage
    from infd.engine.executor import Executor
    from infd.grammar.protocol import Vocabulary
    from infd.http.served_model import ServedModel
    from infd.scheduler.layout import Capacity

log = logging.getLogger("infd.daemon")


class LocalModel:
    """A model, its engine and their helpers. Await `load`, then run `engine.run()` until the model is not needed."""

    def __init__(
        self,
        live: LiveConfig,
        environment: Environment,
        executor: Executor | None = None,
        *,
        stage: Callable[[str], Stage],
    ) -> None:
        """Build the components.

        live      settings in force
        executor  executes steps; None: built from the settings
        stage     returns the display of the progress of a stage of loading, given the stage's name

        Raises CheckpointError, ConfigError.
        """
        config = self._config = live.now
        self._environment = environment
        self._stage = stage
        self._loop: asyncio.AbstractEventLoop | None = None
        self.directory: Future[Path] = Future()
        if (directory := resolve.checkpoint(config, environment.models)) is not None:
            self.directory.set_result(directory)
        self.names = resolve.served_names(config)
        resolve.require_grammar_engine(config)
        self.worker = Worker(apart.MODULE)
        self.offload = Offload(interrupt=self.worker.interrupt)
        self.metrics = Metrics(self.names[0])
        self._loading = stage(f"loading {self.names[0]}")
        self._reading = asyncio.Event()  # set when weights begin to be read; at the latest, when they are loaded
        self.executor = executor or components.executor(config, environment, self.directory, self._on_read)
        self.grammars = GrammarService(config.grammar, self.offload, trial_of(config.grammar.engine), self.metrics)
        self.engine = Engine(
            live,
            self.executor,
            self.metrics,
            grammars=self.grammars,
            drafting=drafting(config.scheduler),
            names=self.names,
        )
        self._language: components.Language | None = None
        self._capacity: Capacity | None = None

    async def load(self) -> tuple[ServedModel, Capacity]:
        """Fetch the model if it is on a hub; load its text components, weights and adapters. Raises StartError."""
        self._loop = asyncio.get_running_loop()
        if not self.directory.done():
            self.directory.set_result(await self._fetch())
        async with asyncio.TaskGroup() as tasks:
            language = tasks.create_task(self._read_language(), name="language")
            with self._loading:
                capacity = await self.engine.load()
                self._reading.set()
                for name, path in self._config.lora.modules.items():
                    await self._load_adapter(name, path)
        self._language, self._capacity = language.result(), capacity
        return language.result().serve(self.names, capacity, self.engine.adapters), capacity

    def serve_grammars(self) -> None:
        """Begin to build the grammar compiler for the loaded model's vocabulary, in the background, if it generates."""
        if self._capacity is not None and self._capacity.generates:
            self.grammars.serve(self._vocabulary)

    async def close(self) -> None:
        """End the engine. Every later request is refused."""
        await self.engine.close()

    def release(self) -> None:
        """End the helpers, after `close`: worker processes and threads."""
        self.worker.close()
        self.grammars.close()
        self.offload.close()

    def _vocabulary(self) -> Vocabulary | None:
        assert self._language is not None
        assert self._capacity is not None
        return self._language.vocabulary(self._capacity)

    async def _read_language(self) -> components.Language:
        # The device thread imports torch, then reads weights. Loading the tokenizer during the import would compete for
        # the GIL; reading weights releases the GIL.
        await self._reading.wait()
        return await self.offload(components.Language.load, self.directory.result(), self._config, self.worker)

    def _on_read(self, done: int, total: int) -> None:
        """Show that `done` of the weights' `total` bytes are read; the first call sets `_reading`.

        Called on the device thread; with device.own_process, on the event loop's thread.
        """
        if not done and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._reading.set)
        self._loading(done, total)

    async def _load_adapter(self, name: str, path: str) -> None:
        try:
            await self.engine.adapters.load(name, path)
        except (AdapterExists, AdapterTooLarge) as error:
            raise ConfigError(f"lora.modules: {name}: {error}") from error

    async def _fetch(self) -> Path:
        name = self._config.model.path
        self.engine.lifecycle.enter(State.STARTING, f"fetching {name}")
        with self._stage(f"fetching {name}") as progress:
            hub = await self.offload(components.hub, self._config, self._environment.hub)
            directory = await self.offload(fetch, name, hub, progress)
        self.engine.lifecycle.enter(State.STARTING)
        log.info("fetched", extra={"model": name, "directory": str(directory)})
        return directory


def cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception that ended a group of tasks: a StartError if present, because it causes the other errors."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, StartError)), leaves[0])
