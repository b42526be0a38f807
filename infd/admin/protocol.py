"""What the admin socket says, in the words that server and `infdctl` share.

Replies are JSON objects. Within /v1 fields are added, never renamed or removed,
so an older `infdctl` reads a newer daemon: it skips what it does not know. What
a verb is told is the other way round: a daemon refuses what it does not know,
rather than do something else than it was asked for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from infd.memory import Part

Seconds = Annotated[float, Meta(ge=0, le=1e9)]

ANSWER_TYPE = "application/json"
PROBLEM_TYPE = "application/problem+json"
NEWS_TYPE = "application/x-ndjson"


class Problem(Struct, omit_defaults=False):
    """Why a request was not done, after RFC 9457. `detail` says what to do next; `code` is for programs."""

    title: str
    status: int
    detail: str
    code: str
    type: str = "about:blank"


class Nothing(Struct, forbid_unknown_fields=True):
    """What a verb is told that needs no telling."""


class Version(Struct):
    version: str
    api: tuple[str, ...] = ("v1",)


class Captured(Struct):
    """The decoding steps that a GPU replays, by how many sequences they are of.

    to_come    how many sizes are not captured yet
    failed     those that could not be, and are tried again later
    capture_s  what capturing them has taken so far
    """

    captured: list[int]
    with_adapters: list[int]
    to_come: int
    failed: list[int] = []
    capture_s: float = 0.0


class LargePages(Struct):
    """How much of the weights, on a CPU, was moved into large pages, in bytes, and whether that has ended."""

    bytes: int
    of: int
    ended: bool


class Status(Struct):
    """What the daemon is doing.

    since            Unix time at which the state was entered
    running, waiting choices; waiting_tokens counts the prompts of those that wait
    held             requests, of those that wait, until a paused daemon goes on
    weights          loaded, released (asleep), parked (asleep, in the host's memory) or invalid (a load failed midway);
                     kv_cache: loaded or released
    resident         what stays on a GPU while memory is given back, in bytes by what it is
    pages            of the cache: all, held by running sequences, and kept for their prefix
    prefix_queries   prompt tokens looked up in the cache; prefix_hits were found
    last_step_age_s  None before the first step
    accepted         choices so far; terminal counts how they ended, by reason
    max_model_len, step_tokens, rows    limits in force; 0 until the model is loaded
    device, dtype    where and in which type the model is computed; empty until it is loaded
    quantization     what weights were made while they were loaded
    vocabulary       what the embedding and the head are, if something else than other weights
    cache_dtype      the type of cached keys and values
    graphs           which decoding steps are captured; None where none are ever
    large_pages      None where weights are not moved into them
    apart            which of the checkpoint's texts run in a process of their own, and why
    """

    version: str
    pid: int
    model: str
    state: str
    reason: str
    since: float
    running: int
    waiting: int
    waiting_tokens: int
    pages: int
    pages_referenced: int
    pages_cached: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    steps: int
    last_step_age_s: float | None
    accepted: int
    terminal: dict[str, int]
    max_model_len: int
    step_tokens: int
    rows: int
    held: int = 0
    weights: str = "loaded"
    kv_cache: str = "loaded"
    device: str = ""
    dtype: str = ""
    quantization: str = "none"
    vocabulary: str = ""
    cache_dtype: str = ""
    resident: dict[str, int] = {}
    graphs: Captured | None = None
    large_pages: LargePages | None = None
    apart: dict[str, str] = {}


class RequestRow(Struct):
    """A request that waits, runs, or is still read. `state`: admitted, waiting, running, done."""

    id: str
    state: str
    client: str
    priority: int
    choices: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    age_s: float
    adapter: str | None = None


class Requests(Struct):
    requests: list[RequestRow]


class Selection(Struct):
    """Which kernel a family uses, and why not the others."""

    family: str
    chosen: str
    refused: dict[str, str]


class Ops(Struct):
    """`quantization`: what weights were made while they were loaded."""

    device: str
    dtype: str
    ops: list[Selection]
    quantization: str = "none"


class Abort(Struct, forbid_unknown_fields=True):
    """`id` is a request's, as in `RequestRow`."""

    id: str


class Aborted(Struct):
    id: str


class Draining(Struct):
    """The daemon admits nothing more, and exits when what is in flight has ended."""

    pid: int
    running: int
    waiting: int


class Pause(Struct, forbid_unknown_fields=True):
    """Let no step run until a resume.

    mode    what becomes of the requests in flight: they end, finish first, or stay where they are
    new     what new requests get meanwhile: a wait within bounds, or 503; null: 503 if those before were aborted
    wait_s  how long the answer may wait for the end of it; null: until the end
    """

    mode: Literal["abort", "wait", "keep"] = "wait"
    new: Literal["hold", "reject"] | None = None
    wait_s: Seconds | None = None


class Sleep(Struct, forbid_unknown_fields=True):
    """Come to rest as `Pause` says, what is kept being computed anew later, and give memory back.

    level  1: the cache's; 2: the weights' too, which are read from disk again
    """

    mode: Literal["abort", "wait", "keep"] = "wait"
    level: Literal[1, 2] = 1
    wait_s: Seconds | None = None


class Wake(Struct, forbid_unknown_fields=True):
    """Be again what it was before it slept, or, asked of `resume`, be ready.

    tags  what to take back into memory; null: all. The rest sleeps on, and with it all steps.
    """

    tags: frozenset[Part] | None = None
    wait_s: Seconds | None = None


class LoadWeights(Struct, forbid_unknown_fields=True):
    """Put the weights in directory `path`, of another checkpoint of this model, in place, while no step runs.

    It lies beneath model.weights_root, where a relative `path` begins.
    """

    path: Annotated[str, Meta(min_length=1)]
    wait_s: Seconds | None = None


class Moved(Struct):
    """How far the daemon has come on its way to what was asked for.

    done         whether it is there; else it goes on by itself
    took_s       from the wish to its end
    aborted      choices that it ended
    frozen       choices that wait for the daemon to go on
    freed_bytes  by which what the GPU holds, on a CPU the process, shrank
    weights      as in `Status`; so kv_cache
    """

    state: str
    reason: str
    done: bool
    took_s: float | None
    aborted: int
    frozen: int
    freed_bytes: int
    weights: str
    kv_cache: str
    running: int
    waiting: int
    held: int


class ResetPrefixCache(Struct, forbid_unknown_fields=True):
    """`running`: requests that run are computed anew; else they go on with what they hold."""

    running: bool = False


class PrefixCacheReset(Struct):
    """`pages` were forgotten; `preempted` choices are computed anew."""

    pages: int
    preempted: int


class LoadLora(Struct, forbid_unknown_fields=True):
    """Serve the adapter in directory `path`, beneath lora.root, as `name`.

    in_place  where the name stands for an adapter already, put this one in its place
    wait_s    how long the answer may wait, once it is loaded, for requests that use the one replaced; null: to the end
    """

    name: str
    path: str
    in_place: bool = False
    wait_s: Seconds | None = 0.0


class UnloadLora(Struct, forbid_unknown_fields=True):
    """Serve `name` no more. `wait_s`: how long the answer may wait for requests that use it; null: until the end."""

    name: str
    wait_s: Seconds | None = 0.0


class LoraRow(Struct):
    """An adapter.

    state       ready; stored: its weights are read again when asked for; leaving: not served any more, but in use
    base        the model that it says it was made for
    bytes       of host memory that it takes now
    generation  another one each time that an adapter is loaded
    requests    choices that use it
    """

    name: str
    state: str
    path: str
    base: str
    rank: int
    bytes: int
    generation: int
    requests: int


class Loras(Struct):
    """`bytes` of host memory are taken, of at most `host_bytes`."""

    loras: list[LoraRow]
    bytes: int
    host_bytes: int


class LoraChanged(Struct):
    """What came of a load or unload.

    changed   whether there was anything to do
    done      whether nothing is left of what the name stood for before; else it goes with the `requests` that use it
    generation, rank, bytes  of what the name stands for now; 0 where it is nothing
    """

    name: str
    changed: bool
    done: bool
    requests: int
    took_s: float
    generation: int = 0
    rank: int = 0
    bytes: int = 0


class ReadEvents(Struct, forbid_unknown_fields=True):
    """Read what has happened lately, one JSON object a line.

    since   only what came after the event of this number; one that the daemon has not reached is of its predecessor
    follow  go on with what happens from now on, until the asker leaves or the daemon ends
    """

    since: Annotated[int, Meta(ge=0)] = 0
    follow: bool = False


class Event(Struct):
    """Something that happened.

    seq      one more than that of the event before it; a daemon begins with 1
    time     Unix time
    kind     state, verb (who asked for what), rest (what came of it), weights, adapter, step, request
    facts    what there is to know of it; which ones depends on the kind
    dropped  events before this one that were forgotten before they could be told
    """

    seq: int
    time: float
    kind: str
    told: str
    facts: dict[str, str | int | float | bool | None]
    dropped: int = 0


class Stack(Struct):
    """Where a task or thread stands, outermost frame first."""

    name: str
    frames: list[str]


class Dump(Struct):
    tasks: list[Stack]
    threads: list[Stack]
