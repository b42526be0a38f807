"""One daemon from start to exit: its components and tasks, and the order in which they end.

TERM   /readyz answers 503; requests in flight may finish within `drain_timeout_s`; the rest end with an error event
INT    (or a second TERM) all requests end with an error event at once; the process exits within 2 s
USR1   the status and all requests are logged
QUIT   all stacks are logged; the process exits with 134
HUP    all settings are read again; those that may change in a running daemon do
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING

from infd.admin.commands import AdminContext
from infd.admin.server import AdminServer
from infd.config import LiveConfig
from infd.daemon import components, dump, resolve
from infd.daemon.banner import Readiness, announce_ready, process_age_s
from infd.daemon.heartbeat import BEAT_S, Heartbeat, sample_lag, status_line
from infd.daemon.local_model import LocalModel, cause
from infd.daemon.notify import Notifier
from infd.daemon.progress import Stage
from infd.daemon.reload import Reloader, Replacement
from infd.engine.lifecycle.state import State
from infd.errors import ConfigError
from infd.http.app import HttpServer
from infd.mcp.servers import Servers
from infd.memory import trim
from infd.sockets.public import PublicSockets
from infd.telemetry.log import set_levels
from infd.telemetry.recent import RecentLogs

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from infd.config import Config, Environment, Loaded
    from infd.engine.executor import Executor
    from infd.scheduler.layout import Capacity

log = logging.getLogger("infd.daemon")

EX_DRAIN_TIMED_OUT = os.EX_TEMPFAIL  # 75
EX_DUMPED = 128 + signal.SIGABRT  # 134
FAST_EXIT_S = 1.8  # less than the documented 2 s
CLOSING_S = 5.0


Work = Callable[[str, int, asyncio.Event], Coroutine[None, None, int]]


class Daemon:
    """One server: owns its components, and handles the process's signals.

    executor  executes steps; None: built from the settings
    work      coroutine function that runs once the daemon is ready; its result is the daemon's exit code. The daemon
              stops when it ends. Arguments: the endpoint's address, the number of sequences that the device computes at
              once, an event that the daemon sets when it stops earlier
    start     `config` with its sources, which a reload reads again; None: there are none
    """

    def __init__(
        self,
        config: Config,
        environment: Environment,
        executor: Executor | None = None,
        work: Work | None = None,
        start: Loaded | None = None,
    ) -> None:
        self.live = LiveConfig(config)
        self.environment = environment
        self._work = work
        self._worked: asyncio.Task[int] | None = None
        self._stopping = asyncio.Event()
        self._stop_reason = ""
        self._fast = asyncio.Event()
        self._guard: threading.Timer | None = None
        self._sockets: PublicSockets | None = None
        self.logs = RecentLogs()

        self._start = Replacement.read(config, environment)
        self._tls = self._start.tls is not None
        self.model = LocalModel(self.live, environment, executor, stage=self._stage)
        self.names, self.engine = self.model.names, self.model.engine
        self.notifier = Notifier(environment.notify_socket)
        self.store = components.store(self.live, self.model.offload)
        self.http = HttpServer(
            self.engine,
            self.live,
            self.model.metrics,
            self._start.keys,
            self.model.offload,
            self.store,
            Servers.read(config.mcp),
        )
        self.reloader = Reloader(
            self.live, start, environment, self.model.offload, self.engine.events, self._apply, self._start.keys
        )
        self._hangup = asyncio.Event()
        self.admin_socket = environment.admin_socket(config)
        self.admin = AdminServer(
            AdminContext(
                self.engine,
                self.names[0],
                self._on_drain,
                self.reloader,
                lambda: resolve.lora_root(self.live.now),
                self.model.worker.reasons,
                self.model.grammars.describe,
                self.logs,
            )
        )

    async def run(self) -> int:
        """Serve until TERM, INT, `infdctl drain` or the end of `work`. Return the exit code. Raises StartError."""
        self._listen_to_signals()
        logging.getLogger().addHandler(self.logs)
        try:
            return await self._serve()
        except BaseExceptionGroup as group:
            raise cause(group) from None
        finally:
            await self._close(self.http.close())
            if self._sockets is not None:
                self._sockets.close()
            await self._close(self.admin.close())
            await self._close(self.model.close(), loading=not self.engine.loaded)
            self.model.release()
            self.notifier.close()
            self._ignore_signals()
            logging.getLogger().removeHandler(self.logs)
            if self._guard is not None:
                self._guard.cancel()

    async def _serve(self) -> int:
        await self.store.open()
        sockets = self._sockets = self._bind()
        if not sockets.inherited:
            await self.http.start(sockets.sockets, self._start.tls)
        await self.admin.start(
            self.admin_socket,
            private=self.admin_socket.parent == self.environment.private,
            # The name of a configured directory may be misspelled, so the directory is not created.
            make_directory=not self.live.now.admin.socket and self.environment.admin is None,
        )
        for doubt in self._start.doubts():
            log.warning("%s", doubt)
        log.info("listening", extra={"address": " ".join(sockets.addresses), "admin": str(self.admin_socket)})
        if sockets.reachable_from_outside and not self.http.keys:
            log.warning(
                "other machines can reach this server, and it requires no API key: set INFD_API_KEY or --api-key-file",
                extra={"address": " ".join(sockets.reachable_from_outside)},
            )
        heartbeat = Heartbeat(self.engine, self.model.executor, self.notifier, self.environment.watchdog_s)
        async with asyncio.TaskGroup() as tasks:
            running = (
                tasks.create_task(self._load_and_run(sockets), name="daemon"),
                tasks.create_task(heartbeat.run(), name="heartbeat"),
                tasks.create_task(sample_lag(self.engine, self.model.metrics), name="loop-lag"),
                tasks.create_task(self.engine.window.run(), name="window"),
                tasks.create_task(self._reload_on_hangup(), name="reload"),
                tasks.create_task(self._exit_when_idle(), name="idle-exit"),
            )
            await self._stopping.wait()
            code = await self._wind_down()
            if self._worked is not None:
                with suppress(TimeoutError):
                    code = await asyncio.wait_for(self._worked, CLOSING_S)
            for task in running:
                task.cancel()
        self.reloader.close()
        log.info("stopped", extra={"exit_code": code})
        return code

    def _bind(self) -> PublicSockets:
        if self.environment.inherited:
            return PublicSockets.inherit(self.environment.inherited, tls=self._tls)
        if self.live.now.server.idle_exit_s is not None:
            raise ConfigError(
                "server.idle_exit_s: no connection would start infd again, because systemd passed no socket: enable"
                " infd.socket, or unset it"
            )
        return PublicSockets.bind(self.live.now.server)

    async def _load_and_run(self, sockets: PublicSockets) -> None:
        served, capacity = await self.model.load()
        self._warn_unless_sleep_works()
        self.http.served = served
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.engine.run(), name="engine")
            # Created after the engine's task, so that the engine enters READY before readiness is announced.
            announced = tasks.create_task(self._announce(sockets, capacity), name="announce")
            if self._work is not None:
                await announced
                self._worked = tasks.create_task(self._work(sockets.url, capacity.rows, self._stopping), name="work")
                self._worked.add_done_callback(self._on_worked)

    def _warn_unless_sleep_works(self) -> None:
        if self.live.now.server.idle_sleep_s is not None and (reason := self.model.executor.sleep_refusal):
            log.warning(
                "server.idle_sleep_s is set, but infd cannot sleep here and keeps its memory: unset it, or choose a"
                " device that can",
                extra={"reason": reason},
            )

    @property
    def _on_terminal(self) -> bool:
        """Whether to draw on standard error: log.banner is set, the log is plain text, and its output is a terminal."""
        return self.live.now.log.banner and self.live.now.log.format in ("auto", "plain") and sys.stderr.isatty()

    def _stage(self, name: str) -> Stage:
        if not self._on_terminal:
            return Stage(name, None)
        from rich.console import Console

        return Stage(name, Console(stderr=True, highlight=False))

    async def _announce(self, sockets: PublicSockets, capacity: Capacity) -> None:
        self.model.metrics.cache_config = {
            "block_size": str(self.live.now.cache.page_tokens),
            "num_gpu_blocks": str(capacity.pages),
            "enable_prefix_caching": str(self.live.now.cache.prefix_caching),
            "cache_dtype": str(self.engine.describe().get("cache_dtype", "")),
        }
        # Nearly all present objects live until exit, so freeze() exempts them from collection. The imports' garbage,
        # 1 MB in 13,000 objects, is exempted too, because a collection before freeze() would hold the GIL for 0.2 s.
        gc.freeze()
        # Reference counting frees most objects, so a young collection every 700 allocations would free little.
        gc.set_threshold(20_000, 20, 20)
        gc.enable()
        trim()  # loading has freed memory: 70 MiB with a vocabulary of 150,000 tokens
        facts = self.engine.describe()
        ready = Readiness(
            model=self.names[0],
            device=str(facts.get("device", "")),
            dtype=str(facts.get("dtype", "")),
            addresses=tuple(sockets.addresses),
            url=sockets.url,
            admin=str(self.admin_socket),
            ready_s=process_age_s(),
            key=len(self.http.keys) > 0,
            embedded=self.live.now.model.path == resolve.EMBEDDED,
            quantization=str(facts.get("quantization", "none")),
            vocabulary=str(facts.get("vocabulary", "")),
            cache_dtype=str(facts.get("cache_dtype", "")),
        )
        if sockets.inherited:  # until now, systemd's socket has queued connections
            await self.http.start(sockets.sockets, self._start.tls)
        announce_ready(ready, banner=self._on_terminal and self._work is None)
        self.notifier.ready(status_line(self.engine))
        self.model.serve_grammars()

    async def _exit_when_idle(self) -> None:
        """Stop after `server.idle_exit_s` without requests."""
        if (idle_exit_s := self.live.now.server.idle_exit_s) is None:
            return
        resting = {State.READY, State.SLEEPING}
        while True:
            await asyncio.sleep(BEAT_S)
            if self.engine.lifecycle.state in resting and self.engine.control.idle_s >= idle_exit_s:
                break
        self._stop_reason = self._stop_reason or f"no request for {idle_exit_s:g} s"
        self._stopping.set()

    async def _reload_on_hangup(self) -> None:
        """Reload for each HUP; signals that arrive during a reload cause one more."""
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            announced = self.engine.lifecycle.state not in (State.STARTING, State.DRAINING)
            if announced:
                self.notifier.reloading()
            try:
                await self.reloader.reload()
            except ConfigError:
                pass  # the reloader has logged it
            except Exception:
                log.exception("not reloaded: this is a bug in infd, or a limit of the system")
            if announced and not self._stopping.is_set():
                self.notifier.ready(status_line(self.engine))

    async def _apply(self, replacement: Replacement) -> None:
        """Put changed settings, API keys and certificates in force; called by the reloader."""
        if replacement.tls is not None or self._tls:
            await self.http.replace_tls(replacement.tls)
            self._tls = replacement.tls is not None
        self.live.now = replacement.config
        self.http.keys = replacement.keys
        self._start = replacement  # read when inherited sockets begin to be served, once the model is loaded
        set_levels(replacement.config.log)
        self._warn_unless_sleep_works()

    async def _wind_down(self) -> int:
        if self._sockets is not None and self._sockets.inherited:
            # systemd queues further connections for the next process.
            self.http.close_listeners()
            if not self._fast.is_set():
                await self.http.await_first_requests()
        # Other listeners stay open until the last stream has ended: probes and scrapes are answered, work with 503.
        self.engine.lifecycle.enter(State.DRAINING, "asked to stop")
        # Only after DRAINING, so that when systemd learns of the stop, the server already refuses new requests.
        self.notifier.stopping(status_line(self.engine))
        timeout_s = 0.0 if self._fast.is_set() else self.live.now.server.drain_timeout_s
        in_flight = self.engine.status().tickets
        log.info("draining", extra={"reason": self._stop_reason, "requests": in_flight, "timeout_s": timeout_s})
        if not self._fast.is_set() and await self._drain():
            return os.EX_OK
        fast, cut_off = self._fast.is_set(), self.engine.status().tickets
        reason = self._stop_reason if fast else "the drain ran out of time"
        self.engine.cut_off(cut_off, reason, after_s=None if fast else self.live.now.server.drain_timeout_s)
        return os.EX_OK if self._fast.is_set() else EX_DRAIN_TIMED_OUT

    async def _drain(self) -> bool:
        """Wait until requests in flight have finished. Return False on timeout or a second signal.

        A change of `server.drain_timeout_s` meanwhile applies, within BEAT_S.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.TaskGroup() as tasks:
            drain = tasks.create_task(self.engine.drain(None), name="drain")
            fast = tasks.create_task(self._fast.wait(), name="second-signal")
            ended, left_s = False, math.inf
            while not ended and left_s > 0:
                left_s = max(0.0, began + self.live.now.server.drain_timeout_s - clock())
                beat_s = min(left_s, BEAT_S)
                done, _ = await asyncio.wait((drain, fast), timeout=beat_s, return_when=asyncio.FIRST_COMPLETED)
                ended = bool(done)
            drained = drain.done() and drain.result()
            drain.cancel()
            fast.cancel()
        return drained

    async def _close(self, closing: Awaitable[None], *, loading: bool = False) -> None:
        # A component that hangs must not prevent the exit. A load may be at work that cannot be interrupted, such as
        # the import of torch: it ends with the process.
        try:
            async with asyncio.timeout(CLOSING_S):
                await closing
        except TimeoutError:
            if loading:
                log.info("exits while the model is still being loaded", extra={"waited_s": CLOSING_S})
                return
            log.error("a component of the daemon did not end within %.0f s", CLOSING_S, stack_info=True)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self._on_int)
        loop.add_signal_handler(signal.SIGHUP, self._hangup.set)
        loop.add_signal_handler(signal.SIGUSR1, dump.status, self.engine)
        loop.add_signal_handler(signal.SIGQUIT, self._on_quit)
        # faulthandler dumps the threads even if the loop is stuck. With `chain`, the loop's handler runs afterwards.
        faulthandler.register(signal.SIGQUIT, all_threads=True, chain=True)

    def _ignore_signals(self) -> None:
        faulthandler.unregister(signal.SIGQUIT)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _on_worked(self, worked: asyncio.Task[int]) -> None:
        self._stop_reason = self._stop_reason or "its work is done"
        self._stopping.set()

    def _on_drain(self) -> None:
        self._stop_reason = "infdctl drain"
        self._stopping.set()

    def _on_term(self) -> None:
        if self._stopping.is_set():
            self._stop_at_once("a second TERM")
        else:
            self._stop_reason = "TERM"
            self._stopping.set()

    def _on_int(self) -> None:
        self._stop_at_once("INT")

    def _stop_at_once(self, reason: str) -> None:
        self._stop_reason = reason
        self._fast.set()
        self._stopping.set()
        if self._guard is None:
            # A thread, because a stuck loop would not run a callback.
            self._guard = threading.Timer(FAST_EXIT_S, os._exit, (os.EX_OK,))
            self._guard.daemon = True
            self._guard.start()

    def _on_quit(self) -> None:
        dump.stacks()
        logging.shutdown()
        os._exit(EX_DUMPED)
