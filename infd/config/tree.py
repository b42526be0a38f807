"""Every setting, in one frozen tree.

Flags, the man page, `infd config show` and the checks all come from these
Structs. Facts derived at run time (pages, step_tokens in force) live elsewhere.
A field whose name ends in `bytes` may be written with a unit: "512M", "2G".
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
# No time is longer than 30 years, or infinite: where there may be no limit, nothing stands for that.
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
Origin = Annotated[str, Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)\Z")]


def about(description: str, *, flag: str | None = None, values: str | None = None) -> Meta:
    """Describe a setting.

    flag    gives it a command-line option of its own
    values  what may be given, where its type does not say it
    """
    return Meta(description=description, extra={"flag": flag, "values": values})


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the TOML file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """What is served."""

    path: Annotated[str, about("checkpoint directory, hub id such as org/name, or 'embedded'", flag="--model")] = (
        "embedded"
    )
    hub: Annotated[Literal["huggingface", "modelscope"], about("where a hub id is fetched from", flag="--hub")] = (
        "huggingface"
    )
    revision: Annotated[
        str, about("branch, tag or commit of a hub id (default: the hub's main branch)", flag="--revision")
    ] = ""
    chat_template: Annotated[
        str, about("file with the chat template (default: the checkpoint's)", flag="--chat-template")
    ] = ""
    tool_parser: Annotated[
        Literal["auto", "none", "hermes"],
        about("how the model writes tool calls; auto: as its chat template does", flag="--tool-parser"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "qwen3"],
        about("how the model marks its thinking; auto: as its chat template does", flag="--reasoning-parser"),
    ] = "auto"
    served_names: Annotated[
        tuple[str, ...],
        about("names that clients use; the first is reported (default: from the path)", flag="--served-name"),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float", "half"],
        about("type of weights and activations; float is float32, half is float16", flag="--dtype"),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4"],
        about(
            "what weights are made while they are loaded: smaller and faster, not quite the same", flag="--quantization"
        ),
    ] = "none"
    quantize_vocabulary: Annotated[
        Literal["auto", "none", "int8", "int4"],
        about(
            "what the embedding and the head are made; auto: as other weights, but int8 where those are int4",
            flag="--quantize-vocabulary",
        ),
    ] = "auto"
    weights_root: Annotated[
        str,
        about(
            "directory that holds what `infdctl load-weights` may load (default: the one that holds the model's own)",
            flag="--weights-root",
        ),
    ] = ""
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        about("longest sequence in tokens, prompt and answer together (default: the model's)", flag="--max-model-len"),
    ] = None


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP endpoint."""

    host: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(min_length=1),
        about("where to listen: names, IPv4 and IPv6 addresses, `unix:/path`", flag="--host"),
    ] = ("127.0.0.1",)
    port: Annotated[int, Meta(ge=0, le=65535), about("TCP port; 0 picks a free one", flag="--port")] = 8000
    cors_origins: Annotated[
        tuple[Origin, ...],
        about("pages that browsers let ask here: `https://chat.example`, or `*` for all; empty: none"),
    ] = ()
    unix_mode: Annotated[
        str, Meta(pattern=r"^0?[0-7]{3}\Z"), about("who may connect to `unix:` hosts, as chmod's octal digits")
    ] = "0660"
    api_key_file: Annotated[
        str,
        about("file of clients' keys, see KEY FILE; empty: no keys", flag="--api-key-file"),
    ] = ""
    max_connections: Annotated[Count, about("connections at once; the longest silent one makes room for a new one")] = (
        4096
    )
    max_connections_per_address: Annotated[
        Count, about("of them from one address (IPv6: one /64); raise it behind a proxy")
    ] = 2048
    header_timeout_s: Annotated[Positive, about("from connecting to the end of the first request's headers")] = 10.0
    idle_timeout_s: Annotated[Positive, about("how long a connection may wait for its next request")] = 75.0
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        about("largest request body (default: 64K, and 32 bytes a token of the longest sequence; at least 1M)"),
    ] = None
    body_timeout_s: Annotated[Positive, about("longest time a request body may take to arrive")] = 30.0
    body_pace: Annotated[Count, about("bytes a second at which a larger body may take longer than that")] = 2**16
    max_bodies_bytes: Annotated[int, Meta(ge=1024), about("all request bodies arriving at once, then 429")] = (
        256 * 2**20
    )
    queue_timeout_s: Annotated[
        Positive | None, about("longest wait for a first step, then 503 (default: no limit)")
    ] = None
    request_timeout_s: Annotated[
        Positive | None, about("longest life of a request, then 504 or an error event (default: no limit)")
    ] = None
    hold_timeout_s: Annotated[
        Positive, about("longest wait of a new request for a paused or waking server, then 503")
    ] = 300.0
    wake_on_request: Annotated[bool, about("whether a request wakes a server that was put to sleep while ready")] = (
        False
    )
    idle_sleep_s: Annotated[
        Positive | None, about("fall asleep when nobody has asked for this long; a request wakes it (default: never)")
    ] = None
    idle_sleep_level: Annotated[
        int,
        Meta(ge=1, le=2),
        about(
            "how deep that sleep is: 1 gives the cache's memory back, and moves a GPU's weights to the host;"
            " 2 drops the weights"
        ),
    ] = 1
    drain_timeout_s: Annotated[NotNegative, about("how long TERM waits for requests in flight")] = 60.0


class LimitsConfig(Section, frozen=True, kw_only=True):
    """Bounds on one request."""

    choices: Annotated[Count, about("largest n")] = 128
    stop_strings: Annotated[Natural, about("most stop strings")] = 16
    stop_characters: Annotated[Count, about("longest stop string")] = 256
    logit_bias: Annotated[Natural, about("most entries of logit_bias")] = 1024
    bad_words: Annotated[Natural, about("most entries of bad_words")] = 1024
    top_logprobs: Annotated[Natural, about("most alternatives reported a token")] = 20
    prompt_logprobs_bytes: Annotated[
        Count,
        about(
            "most an answer may tell of its prompts' tokens, which prompt_logprobs, or echo with logprobs, ask for:"
            " 128 bytes for each of n x tokens x (prompt_logprobs + 1)"
        ),
    ] = 128 * 2**20
    cache_salt: Annotated[Natural, about("longest cache_salt, in characters")] = 128
    json_depth: Annotated[int, Meta(ge=8), about("deepest nesting of a request body")] = 128


class DeviceConfig(Section, frozen=True, kw_only=True):
    """Where the model runs."""

    kind: Annotated[
        str,
        Meta(pattern=r"^(auto|cpu|cuda(:\d{1,3})?|null)\Z"),
        about(
            "what computes; 'cuda:1' is the second of several GPUs, 'null' computes nothing",
            flag="--device",
            values="auto|cpu|cuda|cuda:N|null",
        ),
    ] = "auto"
    # Where the system has no room for as many, OpenMP ends the process without a word to us.
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, about("compute threads on a CPU (default: cores)")
    ] = None
    depth: Annotated[
        Annotated[int, Meta(ge=1, le=8)] | None, about("steps in flight (default: 1 on a CPU, 2 on a GPU)")
    ] = None
    memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        about("share of what a GPU has free when infd starts, for weights, steps and cache together"),
    ] = 0.9
    graphs: Annotated[
        bool, about("whether a GPU replays decoding steps that were captured once, instead of launching each kernel")
    ] = True
    flashinfer: Annotated[
        bool, about("whether FlashInfer's kernels are chosen before Triton's, where they can be used on a GPU")
    ] = False
    kernel_cache: Annotated[
        str,
        about(
            "directory of kernels compiled for a GPU, and of calibration.json: what starts have measured of steps,"
            " measured again once that file is removed (default: kernels in systemd's $CACHE_DIRECTORY, else in"
            " $XDG_CACHE_HOME/infd)"
        ),
    ] = ""
    own_process: Annotated[
        bool, about("whether a process of its own drives the device; a lost one still ends the daemon")
    ] = False
    null_step_ms: Annotated[NotNegative, about("how long a step of the null device takes")] = 0.0


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """How steps are filled."""

    step_tokens: Annotated[Count | None, about("most tokens in one step (default: measured at start)")] = None
    step_target_ms: Annotated[
        Positive | None,
        about(
            "what a step may take (default: 150 on a CPU, 50 on a GPU; where streams wait for it, and at most 8"
            " prompts, 50, or 1.75 times as long as the shortest step if that is more)"
        ),
    ] = None
    max_num_seqs: Annotated[Count, about("sequences that run at once", flag="--max-num-seqs")] = 64
    max_waiting: Annotated[Count, about("queued choices before 429")] = 1024
    max_waiting_tokens: Annotated[Count, about("queued prompt tokens before 429")] = 2**20
    priority_patience: Annotated[
        Count, about("later arrivals that may overtake a request, for each level of priority")
    ] = 64


class CacheConfig(Section, frozen=True, kw_only=True):
    """The paged key-value cache."""

    bytes: Annotated[
        Annotated[int, Meta(ge=2**16)] | None,
        about("size of the cache (default: from free memory)", flag="--kv-cache-bytes"),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"],
        about(
            "type of cached keys and values; auto: that of activations, the only float that is kept as it is; int8 is"
            " for a CPU, fp8, or fp8_e4m3, for a GPU",
            flag="--kv-cache-dtype",
        ),
    ] = "auto"
    page_tokens: Annotated[int, Meta(ge=1, le=1024), about("tokens in one page")] = 16
    prefix_caching: Annotated[bool, about("keep the pages of prompts for the next one that starts alike")] = True
    isolation: Annotated[
        Literal["tenant", "none"], about("who may share cached prefixes: one tenant, or everybody")
    ] = "tenant"


class LoraConfig(Section, frozen=True, kw_only=True):
    """Adapters (LoRA), each served under a name of its own beside the model."""

    modules: Annotated[
        dict[str, str], about("adapters served from the start, by name: directories as PEFT saves them", flag="--lora")
    ] = {}
    root: Annotated[
        str,
        about(
            "directory that holds what `infdctl load-lora` may load; empty: nothing, or what ships with infd",
            flag="--lora-root",
        ),
    ] = ""
    max_adapters: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], about("adapters that the device holds at once; others are swapped in")
    ] = 16
    max_adapters_per_step: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], about("adapters whose requests run at once; the next one waits")
    ] = 16
    host_bytes: Annotated[
        Annotated[int, Meta(ge=2**10)],
        about("memory for adapters; those that nobody uses leave it first, and are read again when asked for"),
    ] = 4 * 2**30


class AdminConfig(Section, frozen=True, kw_only=True):
    """The administrative socket."""

    socket: Annotated[
        str,
        about(
            "admin socket's path (default: admin.sock in $XDG_RUNTIME_DIR/infd, /tmp/infd-UID, as root /run/infd)",
            flag="--admin-socket",
        ),
    ] = ""


class LogConfig(Section, frozen=True, kw_only=True):
    """What is written to standard error or the journal."""

    level: Annotated[Literal["debug", "info", "warning", "error"], about("least level written", flag="--log-level")] = (
        "info"
    )
    format: Annotated[
        Literal["auto", "plain", "json", "journal"], about("auto: the journal if it listens, else plain")
    ] = "auto"
    access: Annotated[bool, about("one line per request")] = True
    banner: Annotated[bool, about("greet on a terminal", flag="--no-banner")] = True


class MetricsConfig(Section, frozen=True, kw_only=True):
    """GET /metrics."""

    public: Annotated[bool, about("readable without a key")] = False
    compat: Annotated[Literal["vllm", "none"], about("also emit the names that vLLM's dashboards query")] = "vllm"


class Config(Section, frozen=True, kw_only=True):
    """All of infd's settings."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    device: DeviceConfig = DeviceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    lora: LoraConfig = LoraConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
