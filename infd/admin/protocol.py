"""Arguments and answers of the admin socket, shared by the server and `infdctl`.

Answers are JSON objects. Within /v1, new versions may add fields to answers, but never
rename or remove fields; readers skip unknown fields, so that an older `infdctl`
reads a newer daemon's answers. A daemon refuses arguments with unknown fields,
so that no part of a command is ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from infd.memory import MemoryPart

Seconds = Annotated[float, Meta(ge=0, le=1e9)]

STATES = ("starting", "ready", "draining", "paused", "sleeping", "failed")

ANSWER_TYPE = "application/json"
PROBLEM_TYPE = "application/problem+json"
FEED_TYPE = "application/x-ndjson"


class Problem(Struct, omit_defaults=False):
    """A refusal as an RFC 9457 problem document. `detail` names the remedy; `code` is for programs."""

    title: str
    status: int
    detail: str
    code: str
    type: str = "about:blank"


class NoArguments(Struct, forbid_unknown_fields=True):
    """No arguments; unknown fields are refused."""


class Version(Struct):
    version: str
    api: tuple[str, ...] = ("v1",)


class Captured(Struct):
    """CUDA graphs of decoding steps, by number of sequences in the step.

    captured       sizes captured
    with_adapters  sizes captured for steps with adapters
    to_come        number of sizes not captured yet
    failed         sizes whose last capture failed; infd retries these captures
    capture_s      seconds spent on captures
    """

    captured: list[int]
    with_adapters: list[int]
    to_come: int
    failed: list[int] = []
    capture_s: float = 0.0


class LargePages(Struct):
    """The move of a CPU's weights into large pages.

    bytes  bytes moved so far
    of     bytes of all weights
    ended  whether infd has stopped moving bytes
    """

    bytes: int
    of: int
    ended: bool


class SettingChange(Struct):
    key: str
    old: Any
    new: Any


class Status(Struct):
    """State, load and limits of the daemon.

    model             served name
    since             Unix time of the change to `state`
    running, waiting  numbers of choices; waiting includes choices not queued yet
    waiting_tokens    prompt tokens of the waiting choices
    held              waiting requests that are held until the daemon is ready
    weights           loaded, released (on disk only), parked (in host memory) or invalid (a load failed midway)
    kv_cache          loaded or released
    resident          bytes that stay on the GPU during sleep, by purpose
    pages             cache pages; pages_referenced by running sequences, pages_cached for prefix hits
    prefix_queries    prompt tokens looked up in the prefix cache; prefix_hits: tokens found
    drafts            steps of a choice that verified drafts; accepted_drafts: drafts kept, by their position
    steps             steps run; last_step_age_s: None before the first step
    accepted          choices accepted; terminal: choices ended, by finish reason
    max_model_len, step_tokens, rows    limits in force; 0 until the model is loaded
    device, dtype     device and data type of the model's computation; empty until the model is loaded
    quantization      format into which weights were quantized while loading
    stored            number of matrices that the checkpoint stores quantized, by encoding
    vocabulary        format of embedding and head; empty: the format of the other weights
    cache_dtype       data type of cached keys and values
    graphs            captured decoding steps; None: decoding steps are not captured
    large_pages       None: weights are not moved into large pages
    apart             template and tokenizer components that run in the worker process, with reasons
    rejected          requests refused since the start, by error code
    restart           settings whose new value, found by the last reload, takes effect at the next start
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
    drafts: int = 0
    accepted_drafts: tuple[int, ...] = ()
    weights: str = "loaded"
    kv_cache: str = "loaded"
    device: str = ""
    dtype: str = ""
    quantization: str = "none"
    stored: dict[str, int] = {}
    vocabulary: str = ""
    cache_dtype: str = ""
    resident: dict[str, int] = {}
    graphs: Captured | None = None
    large_pages: LargePages | None = None
    apart: dict[str, str] = {}
    rejected: dict[str, int] = {}
    restart: list[SettingChange] = []


class RequestRow(Struct):
    """A request, from its admission until its answer is sent or its client leaves.

    state   admitted (not queued yet), waiting, running, or done (the answer is not sent completely)
    client  name of the API key
    """

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
    tenant: str = ""


class Requests(Struct):
    requests: list[RequestRow]


class ReadSlow(Struct, forbid_unknown_fields=True):
    """List the slowest requests that ended within the last hours.

    by        the time that is compared: of the whole answer, until the first token, or until the first step
    within_s  only requests that ended in the last so many seconds
    """

    by: Literal["total", "ttft", "queue"] = "total"
    within_s: Annotated[float, Meta(ge=0)] = 6 * 3600.0


class SlowRequest(Struct):
    """A request that was queued and has ended.

    id         as the log's `request_id`: the client's X-Request-Id if it sent one
    client     name of the API key
    model      served name of the model or adapter
    time       Unix time of the end
    queue_ms   from the arrival to the first step; null: no step computed the request
    ttft_ms    from the arrival to the first token; null: there was none
    prompt     prompt tokens; `cached` of them were found in the cache
    generated  tokens delivered
    cause      what took most of the time that is compared, in words
    """

    id: str
    client: str
    tenant: str
    model: str
    time: float
    queue_ms: float | None
    ttft_ms: float | None
    total_ms: float
    prompt: int
    cached: int
    generated: int
    finish: str
    cause: str


class SlowRequests(Struct):
    """At most 20 requests, the slowest first, of those that ended in the last `within_s` seconds."""

    within_s: float
    requests: list[SlowRequest]


class Selection(Struct):
    """The implementation chosen for a kernel family, and the refused implementations with reasons.

    The row of family "grammar" names the library that compiles constraints.
    """

    family: str
    chosen: str
    refused: dict[str, str]


class Ops(Struct):
    """Chosen kernels. `quantization` and `stored` as in Status."""

    device: str
    dtype: str
    ops: list[Selection]
    quantization: str = "none"
    stored: dict[str, int] = {}


class ExpertLoad(Struct):
    """The loads of one layer's experts, in sampled steps.

    layer    index among the layers with experts
    choices  choices counted; older ones count for less
    ratio    load of the busiest expert, relative to the mean
    unused   experts that no token chose
    counts   choices of each expert
    """

    layer: int
    choices: int
    ratio: float
    unused: int
    counts: list[int]


class Experts(Struct):
    """The loads of the experts. steps: number of sampled steps; 0 if infd's code routes no experts of the model."""

    steps: int
    layers: list[ExpertLoad]


class Abort(Struct, forbid_unknown_fields=True):
    """End the request with this `RequestRow.id`."""

    id: str


class Aborted(Struct):
    """The request `id` was aborted."""

    id: str


class Draining(Struct):
    """The daemon admits no more requests, and exits after the requests in flight. `running`, `waiting`: choices."""

    pid: int
    running: int
    waiting: int


class Pause(Struct, forbid_unknown_fields=True):
    """Stop steps until resume.

    mode    "abort" ends the requests in flight, "wait" lets them finish, "keep" freezes them
    new     "hold" queues new requests within the queue's bounds, "reject" answers them with 503; null: "reject" with
            mode "abort", else "hold"
    wait_s  maximum seconds for which the answer waits for the transition's end; null: no limit
    """

    mode: Literal["abort", "wait", "keep"] = "wait"
    new: Literal["hold", "reject"] | None = None
    wait_s: Seconds | None = None


class Sleep(Struct, forbid_unknown_fields=True):
    """Pause, then release memory. Frozen requests are recomputed after wake.

    mode    as in `Pause`
    level   1: release the cache, and move a GPU's weights to host memory; 2: release cache and weights, so that wake
            reads the weights from disk
    wait_s  as in `Pause`
    """

    mode: Literal["abort", "wait", "keep"] = "wait"
    level: Literal[1, 2] = 1
    wait_s: Seconds | None = None


class Wake(Struct, forbid_unknown_fields=True):
    """Arguments of wake (return to the state before sleep) and of resume (become ready).

    tags    parts of memory to restore; null: all. The daemon sleeps until all are restored.
    wait_s  as in `Pause`
    """

    tags: frozenset[MemoryPart] | None = None
    wait_s: Seconds | None = None


class SettingRow(Struct):
    """A setting in force.

    origin   where the value comes from: built-in, a file, a variable, a flag, or `infdctl config set`
    live     whether it can change while the daemon runs
    restart  the value of the next start, if the last reload found another one; absent if not
    """

    key: str
    value: Any
    origin: str
    live: bool
    restart: Any | UnsetType = UNSET


class Settings(Struct):
    settings: list[SettingRow]


class ServerInfo(Struct):
    """What the daemon is and was told: vLLM's /server_info.

    config  settings in force, by section
    facts   the device's facts: kernels, sizes, times
    """

    version: str
    model: str
    config: dict[str, dict[str, Any]]
    facts: dict[str, Any]


class SetSettings(Struct, forbid_unknown_fields=True):
    """Give live settings other values, until the next reload or start.

    values  texts, as after `infd start --set KEY=`
    """

    values: Annotated[dict[str, str], Meta(min_length=1)]


class Reloaded(Struct):
    """Settings and API keys after a change.

    applied  settings that changed
    restart  settings with another value in their source, which takes effect at the next start
    keys     number of API keys in force; of them `keys_added` and `keys_changed` (another hash, tenant or limit)
    keys_removed  number of keys that are accepted no longer
    undone   settings among `applied` whose value of `infdctl config set` the reload replaced
    certificate  whether a certificate was read again; later handshakes present it
    doubts   what is likely a mistake in the settings in force, in words
    """

    applied: list[SettingChange]
    restart: list[SettingChange]
    keys: int
    undone: list[str] = []
    certificate: bool = False
    doubts: list[str] = []
    keys_added: int = 0
    keys_removed: int = 0
    keys_changed: int = 0


class LoadWeights(Struct, forbid_unknown_fields=True):
    """Load the weights of another checkpoint of this model, while no step runs.

    path    directory beneath model.weights_root; a relative path starts there
    wait_s  as in `Pause`
    """

    path: Annotated[str, Meta(min_length=1)]
    wait_s: Seconds | None = None


class TransitionResult(Struct):
    """Progress or result of a lifecycle transition.

    done         whether the transition has ended; if not, it continues
    took_s       seconds from the verb's arrival to the transition's end; None before the end
    aborted      choices that the transition aborted
    frozen       choices frozen until resume
    freed_bytes  decrease of GPU memory in use; on a CPU, of resident memory
    Other fields as in `Status`.
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
    """Drop cached prefixes. `running`: also recompute running requests; else running requests keep their pages."""

    running: bool = False


class PrefixCacheReset(Struct):
    """The numbers of pages dropped from the prefix cache, and of running choices that are recomputed."""

    pages: int
    preempted: int


class LoadLora(Struct, forbid_unknown_fields=True):
    """Serve the adapter in directory `path`, beneath lora.root, as `name`.

    in_place  replace an adapter already loaded under the name
    wait_s    maximum seconds for which the answer, after loading, waits until no request uses the replaced adapter;
              null: no limit
    """

    name: str
    path: str
    in_place: bool = False
    wait_s: Seconds | None = 0.0


class UnloadLora(Struct, forbid_unknown_fields=True):
    """Stop serving adapter `name`.

    wait_s  maximum seconds for which the answer waits until no request uses the adapter; null: no limit
    """

    name: str
    wait_s: Seconds | None = 0.0


class LoraRow(Struct):
    """An adapter.

    state       ready; stored: not in memory, read again for the next request; leaving: replaced or unloaded, but in use
    base        base model named in the adapter's config
    bytes       host memory that the weights occupy now
    generation  number that is unique for each load
    requests    choices, and requests in preparation, that use the adapter
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
    """Loaded adapters. Their weights occupy `bytes` of host memory; the limit is `host_bytes`."""

    loras: list[LoraRow]
    bytes: int
    host_bytes: int


class UsageRow(Struct):
    """What one API key has used since the daemon's start.

    key        the key's name; empty: requests to a server without keys
    requests   inference requests that found room in the queue; those refused because of a rate too
    limited    requests refused because a rate was used up
    refused    requests refused because of load or the daemon's state (queue_full, key_in_flight, draining ...)
    answered   requests that were queued and have ended
    prompt     prompt tokens; `cached` of them were found in the cache
    generated  tokens delivered
    """

    key: str
    tenant: str
    requests: int
    limited: int
    refused: int
    answered: int
    prompt: int
    cached: int
    generated: int


class TenantUsage(Struct):
    """The sums over the API keys of one tenant. Fields that are not listed are as in `UsageRow`.

    keys   number of the tenant's API keys
    quota  rates and share in quotas.tenants; empty: none
    """

    tenant: str
    keys: int = 0
    quota: str = ""
    requests: int = 0
    limited: int = 0
    refused: int = 0
    answered: int = 0
    prompt: int = 0
    cached: int = 0
    generated: int = 0


class UsageRows(Struct):
    """What each API key and each tenant has used. `since`: the daemon's start, in Unix time."""

    since: float
    usage: list[UsageRow]
    tenants: list[TenantUsage] = []


class LoraChanged(Struct):
    """Result of a load or unload.

    changed   false if the adapter was loaded, or unloaded, already
    done      whether no replaced or unloaded adapter of this name is in use any more; infd has then freed them all
    requests  number of choices that still use such adapters
    took_s    seconds from the verb's arrival to the answer
    generation, rank, bytes  properties of the adapter now loaded under the name; 0: no adapter
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
    """Read recent events, one JSON object per line.

    since   only events with a larger `seq`; all events if no event has reached this number, as after a restart
    follow  continue with new events until the subscriber disconnects or the daemon exits
    """

    since: Annotated[int, Meta(ge=0)] = 0
    follow: bool = False


class Event(Struct, rename={"message": "told"}):
    """An event.

    seq      consecutive number; a daemon's first event is 1
    time     Unix time
    kind     state, verb (caller, arguments and result of a mutating verb), rest (end of a transition: pause, resume,
             sleep, wake), weights, adapter, step or request
    message  for people; named `told` in JSON
    facts    values that depend on `kind`
    dropped  number of earlier events that were discarded unread
    """

    seq: int
    time: float
    kind: str
    message: str
    facts: dict[str, str | int | float | bool | None]
    dropped: int = 0


class Stack(Struct):
    """Stack of a task or thread, outermost frame first."""

    name: str
    frames: list[str]


class Dump(Struct):
    """Stacks of all asyncio tasks and threads."""

    tasks: list[Stack]
    threads: list[Stack]
