"""The daemon: state, load, limits, kernels, stacks."""

from __future__ import annotations

from msgspec import Struct

from infd.admin.messages.settings import SettingChange

STATES = ("starting", "ready", "draining", "paused", "sleeping", "failed")


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
    native_missing    why a CPU's native kernels are not used, so that answers take many times as long; empty: they are
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
    native_missing: str = ""
    apart: dict[str, str] = {}
    rejected: dict[str, int] = {}
    restart: list[SettingChange] = []


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


class Stack(Struct):
    """Stack of a task or thread, outermost frame first."""

    name: str
    frames: list[str]


class Dump(Struct):
    """Stacks of all asyncio tasks and threads."""

    tasks: list[Stack]
    threads: list[Stack]
