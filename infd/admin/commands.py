"""The verbs and feeds of the admin socket, each with path, arguments and handler, in two tables."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec
from msgspec import Struct, field

from infd.admin import items, protocol, stacks, top
from infd.engine.lifecycle.state import State
from infd.errors import (
    AdapterExists,
    AdapterTooLarge,
    Busy,
    CannotSleep,
    CheckpointError,
    ConfigError,
    InfdError,
    OutOfMemory,
    Overtaken,
    WeightsInvalid,
    WrongState,
)
from infd.memory import ALL
from infd.telemetry.recent import RecentLogs
from infd.telemetry.slowest import PERIOD_S, PERIODS
from infd.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from infd.engine.engine import Engine
    from infd.engine.lifecycle.target import Transition
    from infd.memory import MemoryPart


class Refused(InfdError):
    """The daemon refuses a verb. The message names the remedy."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


# HTTP status and code by the error of a failed transition. 409: in another state the verb would be permitted.
REFUSALS: Final = MappingProxyType(
    {
        WrongState: (409, "wrong_state"),
        Overtaken: (409, "overtaken"),
        Busy: (409, "busy"),
        WeightsInvalid: (409, "weights_invalid"),
        CannotSleep: (501, "cannot_sleep"),
        CheckpointError: (422, "checkpoint"),
        OutOfMemory: (422, "out_of_memory"),
    }
)


class LiveSettings(Protocol):
    """The daemon's settings, and how they change while it runs."""

    def rows(self) -> list[protocol.SettingRow]: ...

    def waiting(self) -> list[protocol.SettingChange]:
        """Return the settings whose new value takes effect at the next start."""

    async def reload(self) -> protocol.Reloaded:
        """Read settings and API keys again. Raises ConfigError."""

    async def set(self, values: Mapping[str, str]) -> protocol.Reloaded:
        """Give live settings other values until the next reload. Raises ConfigError."""


class AdminContext(Struct, frozen=True):
    """The objects and settings that verb handlers use.

    model      served name of the model
    drain      starts draining, as TERM does, and returns at once; idempotent
    settings   the daemon's settings
    lora_root  returns the directory beneath which adapters may be loaded; empty: loading is refused
    apart      reasons why templates and tokenizers run in the worker process, by component
    grammars   returns the row of `ops` for the grammar library, as a dict; empty until the library is chosen
    logs       the latest log records
    closing    set when the admin server closes; ends feeds
    """

    engine: Engine
    model: str
    drain: Callable[[], None]
    settings: LiveSettings
    lora_root: Callable[[], str] = str
    apart: Mapping[str, str] = {}
    grammars: Callable[[], Mapping[str, Any]] = dict
    logs: RecentLogs = field(default_factory=RecentLogs)
    closing: asyncio.Event = field(default_factory=asyncio.Event)


class Verb(Struct, frozen=True):
    """One verb: an operation of the admin socket.

    handler  called with the context and an instance of `arguments`, decoded from JSON body, query and path
    """

    name: str
    path: str
    handler: Callable[[AdminContext, Any], Awaitable[Struct]]
    arguments: type[Struct] = protocol.NoArguments
    mutates: bool = False

    @property
    def method(self) -> str:
        return "POST" if self.mutates else "GET"


class Feed(Struct, frozen=True):
    """One feed, which clients subscribe to: a request is answered with a stream of JSON lines."""

    name: str
    path: str
    handler: Callable[[AdminContext, Any], AsyncGenerator[Struct, None]]
    arguments: type[Struct]
    mutates: Literal[False] = False
    method: Literal["GET"] = "GET"


async def version(context: AdminContext, args: protocol.NoArguments) -> protocol.Version:
    return protocol.Version(__version__)


async def status(context: AdminContext, args: protocol.NoArguments) -> protocol.Status:
    return _status(context)


def _status(context: AdminContext) -> protocol.Status:
    now = msgspec.structs.asdict(context.engine.status())
    own = {
        "version": __version__,
        "pid": os.getpid(),
        "model": context.model,
        "apart": dict(context.apart),
        "rejected": dict(context.engine.metrics.rejected),
        "restart": context.settings.waiting(),
    }
    facts = context.engine.describe()
    names = (
        "device",
        "dtype",
        "quantization",
        "stored",
        "vocabulary",
        "cache_dtype",
        "resident",
        "graphs",
        "large_pages",
        "native_missing",
    )
    computing = {name: facts[name] for name in names if name in facts}
    return msgspec.convert(now | own | computing, protocol.Status)


async def requests(context: AdminContext, args: protocol.NoArguments) -> protocol.Requests:
    rows = msgspec.convert(context.engine.requests(), list[protocol.RequestRow], from_attributes=True)
    return protocol.Requests(rows)


async def slow(context: AdminContext, args: protocol.ReadSlow) -> protocol.SlowRequests:
    within_s = min(args.within_s, PERIODS * PERIOD_S)
    rows = []
    for ended in context.engine.slowest.read(args.by, time.time() - within_s):
        row = msgspec.structs.asdict(ended)
        del row["stages"], row["preemptions"]
        rows.append(protocol.SlowRequest(**row, cause=ended.cause(args.by)))
    return protocol.SlowRequests(within_s, rows)


async def ops(context: AdminContext, args: protocol.NoArguments) -> protocol.Ops:
    if not context.engine.loaded:
        state = context.engine.lifecycle.state.value
        raise Refused(409, "not_loaded", f"kernels are chosen while a model loads; the daemon is {state}: try later")
    facts = context.engine.describe()
    rows = [*facts.get("ops", ()), *filter(None, [context.grammars()])]
    return protocol.Ops(
        device=str(facts.get("device", "")),
        dtype=str(facts.get("dtype", "")),
        quantization=str(facts.get("quantization", "none")),
        stored=facts.get("stored", {}),
        ops=msgspec.convert(rows, list[protocol.Selection]),
    )


async def experts(context: AdminContext, args: protocol.NoArguments) -> protocol.Experts:
    if not context.engine.loaded:
        state = context.engine.lifecycle.state.value
        raise Refused(409, "not_loaded", f"the model is not loaded; the daemon is {state}: try later")
    loads = context.engine.core.scheduler.expert_loads
    layers = [
        protocol.ExpertLoad(load.layer, load.choices, round(load.ratio, 3), load.unused, list(load.counts))
        for load in loads.layers()
    ]
    return protocol.Experts(loads.steps, layers)


async def abort(context: AdminContext, args: protocol.Abort) -> protocol.Aborted:
    if not context.engine.abort(args.id):
        raise Refused(
            404, "unknown_request", f"no request {args.id!r} waits or runs; it may have ended: see `infdctl ps`"
        )
    return protocol.Aborted(args.id)


async def drain(context: AdminContext, args: protocol.NoArguments) -> protocol.Draining:
    now = context.engine.status()
    if context.engine.lifecycle.state is not State.DRAINING:
        context.drain()
    return protocol.Draining(os.getpid(), now.running, now.waiting)


async def config(context: AdminContext, args: protocol.NoArguments) -> protocol.Settings:
    return protocol.Settings(context.settings.rows())


async def server_info(context: AdminContext, args: protocol.NoArguments) -> protocol.ServerInfo:
    config: dict[str, dict[str, Any]] = {}
    for row in context.settings.rows():
        section, _, name = row.key.partition(".")
        config.setdefault(section, {})[name] = row.value
    return protocol.ServerInfo(__version__, context.model, config, dict(context.engine.describe()))


async def config_set(context: AdminContext, args: protocol.SetSettings) -> protocol.Reloaded:
    return await _changed(context.settings.set(args.values))


async def reload(context: AdminContext, args: protocol.NoArguments) -> protocol.Reloaded:
    return await _changed(context.settings.reload())


async def _changed(change: Awaitable[protocol.Reloaded]) -> protocol.Reloaded:
    try:
        return await change
    except ConfigError as error:
        raise Refused(422, "bad_config", str(error)) from error


async def pause(context: AdminContext, args: protocol.Pause) -> protocol.TransitionResult:
    return await _transition(context, lambda: context.engine.control.pause(args.mode, args.new), args.wait_s)


async def resume(context: AdminContext, args: protocol.Wake) -> protocol.TransitionResult:
    return await _transition(context, lambda: context.engine.control.resume(_memory_parts(args)), args.wait_s)


async def sleep(context: AdminContext, args: protocol.Sleep) -> protocol.TransitionResult:
    return await _transition(context, lambda: context.engine.control.sleep(args.mode, args.level), args.wait_s)


async def wake(context: AdminContext, args: protocol.Wake) -> protocol.TransitionResult:
    return await _transition(context, lambda: context.engine.control.wake(_memory_parts(args)), args.wait_s)


async def load_weights(context: AdminContext, args: protocol.LoadWeights) -> protocol.TransitionResult:
    return await _transition(context, lambda: context.engine.control.load_weights(args.path), args.wait_s)


def _memory_parts(args: protocol.Wake) -> frozenset[MemoryPart]:
    return ALL if args.tags is None else args.tags


async def _transition(
    context: AdminContext, begin: Callable[[], Transition], wait_s: float | None
) -> protocol.TransitionResult:
    """Begin a transition, and wait for its end for at most `wait_s` seconds (None: no limit). Raises Refused."""
    try:
        transition = begin()
        done = await transition.result(wait_s)
    except InfdError as error:
        status, code = next((answer for kind, answer in REFUSALS.items() if isinstance(error, kind)), (422, "failed"))
        raise Refused(status, code, str(error)) from error
    now = context.engine.status()
    return protocol.TransitionResult(
        state=now.state,
        reason=now.reason,
        done=done,
        took_s=transition.took_s,
        aborted=transition.aborted,
        frozen=transition.frozen,
        freed_bytes=transition.freed_bytes,
        weights=now.weights,
        kv_cache=now.kv_cache,
        running=now.running,
        waiting=now.waiting,
        held=now.held,
    )


async def reset_prefix_cache(context: AdminContext, args: protocol.ResetPrefixCache) -> protocol.PrefixCacheReset:
    if not context.engine.loaded:
        state = context.engine.lifecycle.state.value
        raise Refused(409, "not_loaded", f"there is no cache before the model is loaded; the daemon is {state}")
    return protocol.PrefixCacheReset(*context.engine.core.forget_prefixes(preempting=args.running))


async def usage(context: AdminContext, args: protocol.NoArguments) -> protocol.UsageRows:
    metrics = context.engine.metrics
    rows = [protocol.UsageRow(key, **msgspec.structs.asdict(used)) for key, used in sorted(metrics.usage.items())]
    quotas = {row.key: row.value for row in context.settings.rows()}.get("quotas.tenants", {})
    sums: dict[str, protocol.TenantUsage] = {}
    for row in rows:
        total = sums.setdefault(row.tenant, protocol.TenantUsage(row.tenant, quota=quotas.get(row.tenant, "")))
        total.keys += bool(row.key)
        for name in ("requests", "limited", "refused", "answered", "prompt", "cached", "generated"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
    return protocol.UsageRows(metrics.since, rows, [sums[tenant] for tenant in sorted(sums)])


async def loras(context: AdminContext, args: protocol.NoArguments) -> protocol.Loras:
    adapters = context.engine.adapters
    rows = msgspec.convert(adapters.rows(), list[protocol.LoraRow], from_attributes=True)
    return protocol.Loras(rows, adapters.bytes, adapters.host_bytes)


async def load_lora(context: AdminContext, args: protocol.LoadLora) -> protocol.LoraChanged:
    if not context.engine.loaded:
        state = context.engine.lifecycle.state.value
        raise Refused(409, "not_loaded", f"an adapter is checked against the model, which is not loaded yet ({state})")
    if not (root := context.lora_root()):
        raise Refused(
            403, "no_root", "lora.root is not set, so nothing may be loaded: set it, in a file and `infdctl reload`"
        )
    began, adapters = time.monotonic(), context.engine.adapters
    try:
        changed = await adapters.load(args.name, args.path, root=root, in_place=args.in_place)
    except CheckpointError as error:
        raise Refused(422, "bad_adapter", str(error)) from error
    except AdapterExists as error:
        raise Refused(422, "name_taken", str(error)) from error
    except AdapterTooLarge as error:
        raise Refused(507, "no_memory", str(error)) from error
    return await _await_unused(context, args.name, args.wait_s, began, changed=changed)


async def unload_lora(context: AdminContext, args: protocol.UnloadLora) -> protocol.LoraChanged:
    began = time.monotonic()
    changed = context.engine.adapters.unload(args.name) is not None
    return await _await_unused(context, args.name, args.wait_s, began, changed=changed)


async def _await_unused(
    context: AdminContext, name: str, wait_s: float | None, began: float, *, changed: bool
) -> protocol.LoraChanged:
    """Wait, at most `wait_s` seconds, until no request uses a replaced or unloaded adapter of this name."""
    adapters = context.engine.adapters
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await adapters.wait_until_unused(name)
    users, row = adapters.users(name), adapters.row(name) if name in adapters else None
    answer = protocol.LoraChanged(name, changed, not users, users, time.monotonic() - began)
    if row is not None:
        answer.generation, answer.rank, answer.bytes = row.generation, row.rank, row.bytes
    return answer


async def dump(context: AdminContext, args: protocol.NoArguments) -> protocol.Dump:
    return protocol.Dump(stacks.task_stacks(), stacks.thread_stacks())


async def events(context: AdminContext, args: protocol.ReadEvents) -> AsyncGenerator[protocol.Event, None]:
    async with aclosing(context.engine.events.read(args.since, follow=args.follow)) as news:
        async for event, missing in news:
            yield protocol.Event(event.seq, event.time, event.kind, event.message, event.facts, missing)


def watch(context: AdminContext, args: items.WatchTop) -> AsyncGenerator[items.Frame, None]:
    return top.frames(context.engine, lambda: _status(context), context.closing, args)


async def logs(context: AdminContext, args: items.ReadLogs) -> AsyncGenerator[items.LogRecord, None]:
    level = logging.getLevelNamesMapping()[args.level.upper()]
    records = context.logs.read(args.last, since=args.since, level=level, request=args.request, follow=args.follow)
    async with aclosing(records) as news:
        async for read, missing in news:
            yield items.LogRecord(
                seq=read.seq,
                time=read.created,
                level=read.level,
                logger=read.logger,
                message=read.message,
                fields=read.fields,
                trace=read.trace,
                dropped=missing,
            )


VERBS = (
    Verb("version", "/version", version),
    Verb("status", "/v1/status", status),
    Verb("ps", "/v1/requests", requests),
    Verb("slow", "/v1/slow", slow, protocol.ReadSlow),
    Verb("ops", "/v1/ops", ops),
    Verb("experts", "/v1/experts", experts),
    Verb("abort", "/v1/requests/{id}/abort", abort, protocol.Abort, mutates=True),
    Verb("drain", "/v1/drain", drain, mutates=True),
    Verb("config", "/v1/config", config),
    Verb("server-info", "/server_info", server_info),
    Verb("config-set", "/v1/config/set", config_set, protocol.SetSettings, mutates=True),
    Verb("reload", "/v1/reload", reload, mutates=True),
    Verb("pause", "/v1/pause", pause, protocol.Pause, mutates=True),
    Verb("resume", "/v1/resume", resume, protocol.Wake, mutates=True),
    Verb("sleep", "/v1/sleep", sleep, protocol.Sleep, mutates=True),
    Verb("wake", "/v1/wake", wake, protocol.Wake, mutates=True),
    Verb("load-weights", "/v1/load-weights", load_weights, protocol.LoadWeights, mutates=True),
    Verb(
        "reset-prefix-cache",
        "/v1/reset-prefix-cache",
        reset_prefix_cache,
        protocol.ResetPrefixCache,
        mutates=True,
    ),
    Verb("usage", "/v1/usage", usage),
    Verb("loras", "/v1/loras", loras),
    Verb("load-lora", "/v1/loras/load", load_lora, protocol.LoadLora, mutates=True),
    Verb("unload-lora", "/v1/loras/unload", unload_lora, protocol.UnloadLora, mutates=True),
    Verb("dump", "/v1/dump", dump),
)
FEEDS = (
    Feed("events", "/v1/events", events, protocol.ReadEvents),
    Feed("top", "/v1/top", watch, items.WatchTop),
    Feed("logs", "/v1/logs", logs, items.ReadLogs),
)
