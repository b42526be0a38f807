"""What can be asked of the daemon over the admin socket: one table, one entry a verb."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import Struct

from infd import __version__
from infd.admin import protocol, stacks
from infd.engine.lifecycle.state import State
from infd.errors import (
    AdapterExists,
    AdapterTooLarge,
    Busy,
    CannotSleep,
    CheckpointError,
    InfdError,
    OutOfMemory,
    Overtaken,
    WeightsInvalid,
    WrongState,
)
from infd.memory import ALL

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

    from infd.engine.engine import Engine
    from infd.engine.lifecycle.target import Transition
    from infd.memory import Part


class Refused(InfdError):
    """A verb that cannot be done. The message says what to do instead."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


# Why a transition failed; 409: another state would permit it.
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


class Desk(Struct, frozen=True):
    """What the verbs act on.

    model      the name under which it is served
    drain      do what TERM does, without waiting for the end of it; harmless when repeated
    lora_root  the directory that holds what may be loaded as an adapter; empty: nothing may
    apart      which of the checkpoint's texts run in a process of their own, and why
    """

    engine: Engine
    model: str
    drain: Callable[[], None]
    lora_root: str = ""
    apart: Mapping[str, str] = {}


class Verb(Struct, frozen=True):
    """One thing to ask.

    handler  is given `asks`, made of a JSON body's fields and of the path's parameters
    """

    name: str
    path: str
    handler: Callable[[Desk, Any], Awaitable[Struct]]
    asks: type[Struct] = protocol.Nothing
    mutates: bool = False

    @property
    def method(self) -> str:
        return "POST" if self.mutates else "GET"


class Feed(Struct, frozen=True):
    """Something to read along: news, one JSON object a line."""

    name: str
    path: str
    handler: Callable[[Desk, Any], AsyncGenerator[Struct, None]]
    asks: type[Struct]
    mutates: Literal[False] = False
    method: Literal["GET"] = "GET"


async def version(desk: Desk, asked: protocol.Nothing) -> protocol.Version:
    return protocol.Version(__version__)


async def status(desk: Desk, asked: protocol.Nothing) -> protocol.Status:
    now = msgspec.structs.asdict(desk.engine.status())
    own = {"version": __version__, "pid": os.getpid(), "model": desk.model, "apart": dict(desk.apart)}
    facts = desk.engine.describe()
    names = ("device", "dtype", "quantization", "vocabulary", "cache_dtype", "resident", "graphs", "large_pages")
    told = {name: facts[name] for name in names if name in facts}
    return msgspec.convert(now | own | told, protocol.Status)


async def requests(desk: Desk, asked: protocol.Nothing) -> protocol.Requests:
    rows = msgspec.convert(desk.engine.requests(), list[protocol.RequestRow], from_attributes=True)
    return protocol.Requests(rows)


async def ops(desk: Desk, asked: protocol.Nothing) -> protocol.Ops:
    if not desk.engine.loaded:
        state = desk.engine.lifecycle.state.value
        raise Refused(409, "not_loaded", f"kernels are chosen while a model loads; the daemon is {state}: try later")
    facts = desk.engine.describe()
    return protocol.Ops(
        device=str(facts.get("device", "")),
        dtype=str(facts.get("dtype", "")),
        quantization=str(facts.get("quantization", "none")),
        ops=msgspec.convert(facts.get("ops", ()), list[protocol.Selection]),
    )


async def abort(desk: Desk, asked: protocol.Abort) -> protocol.Aborted:
    if not desk.engine.abort(asked.id):
        raise Refused(
            404, "unknown_request", f"no request {asked.id!r} waits or runs; it may have ended: see `infdctl ps`"
        )
    return protocol.Aborted(asked.id)


async def drain(desk: Desk, asked: protocol.Nothing) -> protocol.Draining:
    now = desk.engine.status()
    if desk.engine.lifecycle.state is not State.DRAINING:
        desk.drain()
    return protocol.Draining(os.getpid(), now.running, now.waiting)


async def pause(desk: Desk, asked: protocol.Pause) -> protocol.Moved:
    return await _moved(desk, lambda: desk.engine.control.pause(asked.mode, asked.new), asked.wait_s)


async def resume(desk: Desk, asked: protocol.Wake) -> protocol.Moved:
    return await _moved(desk, lambda: desk.engine.control.resume(_parts(asked)), asked.wait_s)


async def sleep(desk: Desk, asked: protocol.Sleep) -> protocol.Moved:
    return await _moved(desk, lambda: desk.engine.control.sleep(asked.mode, asked.level), asked.wait_s)


async def wake(desk: Desk, asked: protocol.Wake) -> protocol.Moved:
    return await _moved(desk, lambda: desk.engine.control.wake(_parts(asked)), asked.wait_s)


async def load_weights(desk: Desk, asked: protocol.LoadWeights) -> protocol.Moved:
    return await _moved(desk, lambda: desk.engine.control.load_weights(asked.path), asked.wait_s)


def _parts(asked: protocol.Wake) -> frozenset[Part]:
    return ALL if asked.tags is None else asked.tags


async def _moved(desk: Desk, begin: Callable[[], Transition], wait_s: float | None) -> protocol.Moved:
    """Begin a transition and wait for its end, at most `wait_s` seconds."""
    try:
        transition = begin()
        done = await transition.result(wait_s)
    except InfdError as error:
        status, code = next((answer for kind, answer in REFUSALS.items() if isinstance(error, kind)), (422, "failed"))
        raise Refused(status, code, str(error)) from error
    now = desk.engine.status()
    return protocol.Moved(
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


async def reset_prefix_cache(desk: Desk, asked: protocol.ResetPrefixCache) -> protocol.PrefixCacheReset:
    if not desk.engine.loaded:
        state = desk.engine.lifecycle.state.value
        raise Refused(409, "not_loaded", f"there is no cache before the model is loaded; the daemon is {state}")
    return protocol.PrefixCacheReset(*desk.engine.core.forget_prefixes(preempting=asked.running))


async def loras(desk: Desk, asked: protocol.Nothing) -> protocol.Loras:
    adapters = desk.engine.adapters
    rows = msgspec.convert(adapters.rows(), list[protocol.LoraRow], from_attributes=True)
    return protocol.Loras(rows, adapters.bytes, adapters.host_bytes)


async def load_lora(desk: Desk, asked: protocol.LoadLora) -> protocol.LoraChanged:
    if not desk.engine.loaded:
        state = desk.engine.lifecycle.state.value
        raise Refused(409, "not_loaded", f"an adapter is checked against the model, which is not loaded yet ({state})")
    if not desk.lora_root:
        raise Refused(
            403, "no_root", "lora.root is not set, so nothing may be loaded: set it (--lora-root) and start infd again"
        )
    began, adapters = time.monotonic(), desk.engine.adapters
    try:
        changed = await adapters.load(asked.name, asked.path, root=desk.lora_root, in_place=asked.in_place)
    except CheckpointError as error:
        raise Refused(422, "bad_adapter", str(error)) from error
    except AdapterExists as error:
        raise Refused(409, "name_taken", str(error)) from error
    except AdapterTooLarge as error:
        raise Refused(507, "no_memory", str(error)) from error
    return await _left(desk, asked.name, asked.wait_s, began, changed=changed)


async def unload_lora(desk: Desk, asked: protocol.UnloadLora) -> protocol.LoraChanged:
    began = time.monotonic()
    changed = desk.engine.adapters.unload(asked.name) is not None
    return await _left(desk, asked.name, asked.wait_s, began, changed=changed)


async def _left(desk: Desk, name: str, wait_s: float | None, began: float, *, changed: bool) -> protocol.LoraChanged:
    """Wait until nothing is left of what a name stood for, at most so long."""
    adapters = desk.engine.adapters
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await adapters.left(name)
    users, row = adapters.users(name), adapters.row(name) if name in adapters else None
    answer = protocol.LoraChanged(name, changed, not users, users, time.monotonic() - began)
    if row is not None:
        answer.generation, answer.rank, answer.bytes = row.generation, row.rank, row.bytes
    return answer


async def dump(desk: Desk, asked: protocol.Nothing) -> protocol.Dump:
    return protocol.Dump(stacks.task_stacks(), stacks.thread_stacks())


async def events(desk: Desk, asked: protocol.ReadEvents) -> AsyncGenerator[protocol.Event, None]:
    async with aclosing(desk.engine.events.read(asked.since, follow=asked.follow)) as news:
        async for event, missing in news:
            yield protocol.Event(event.seq, event.time, event.kind, event.told, event.facts, missing)


VERBS = (
    Verb("version", "/version", version),
    Verb("status", "/v1/status", status),
    Verb("ps", "/v1/requests", requests),
    Verb("ops", "/v1/ops", ops),
    Verb("abort", "/v1/requests/{id}/abort", abort, protocol.Abort, mutates=True),
    Verb("drain", "/v1/drain", drain, mutates=True),
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
    Verb("loras", "/v1/loras", loras),
    Verb("load-lora", "/v1/loras/load", load_lora, protocol.LoadLora, mutates=True),
    Verb("unload-lora", "/v1/loras/unload", unload_lora, protocol.UnloadLora, mutates=True),
    Verb("dump", "/v1/dump", dump),
)
FEEDS = (Feed("events", "/v1/events", events, protocol.ReadEvents),)
