"""Every setting, in one frozen tree.

Flags, the man page, `infd config show` and the checks all come from these
Structs. Facts derived at run time (pages, step_tokens in force) live elsewhere.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the TOML file."""


class ModelConfig(Section):
    """What is served."""

    path: Annotated[str, Meta(description="checkpoint directory, or 'embedded'")] = "embedded"
    served_names: Annotated[
        tuple[str, ...], Meta(description="names that clients use; the first is reported (default: from path)")
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Meta(description="type of weights and activations")
    ] = "auto"
    max_model_len: Annotated[int, Meta(ge=1)] | None = None


class ServerConfig(Section):
    """The HTTP endpoint."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0 picks a free one")] = 8000
    api_key_file: Annotated[str, Meta(description="lines `name:sha256-of-key[:tenant]`; empty: no keys")] = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body")] = 16 * 2**20
    body_timeout_s: Annotated[float, Meta(gt=0, description="longest time a request body may take to arrive")] = 30.0
    drain_timeout_s: Annotated[float, Meta(ge=0, description="how long TERM waits for requests in flight")] = 60.0


class LimitsConfig(Section):
    """Bounds on one request."""

    choices: Annotated[int, Meta(ge=1, description="largest n")] = 128
    stop_strings: Annotated[int, Meta(ge=0)] = 16
    stop_characters: Annotated[int, Meta(ge=1)] = 256
    logit_bias: Annotated[int, Meta(ge=0)] = 1024
    top_logprobs: Annotated[int, Meta(ge=0)] = 20
    cache_salt: Annotated[int, Meta(ge=0)] = 128
    json_depth: Annotated[int, Meta(ge=8)] = 128


class DeviceConfig(Section):
    """Where the model runs."""

    kind: Annotated[Literal["auto", "cpu", "cuda", "null"], Meta(description="'null' computes nothing")] = "auto"
    threads: Annotated[int, Meta(ge=1, description="compute threads on a CPU (default: cores)")] | None = None
    depth: Annotated[int, Meta(ge=1, le=8, description="steps in flight (default: 1 on a CPU, 2 on a GPU)")] | None = (
        None
    )
    null_step_ms: Annotated[float, Meta(ge=0, description="how long a step of the null device takes")] = 0.0


class SchedulerConfig(Section):
    """How steps are filled."""

    step_tokens: Annotated[int, Meta(ge=1, description="most tokens in one step (default: measured at start)")] | None = (
        None
    )
    step_target_ms: (
        Annotated[float, Meta(gt=0, description="what a mixed step may take (default: 150 on a CPU, 50 on a GPU)")] | None
    ) = None
    max_num_seqs: Annotated[int, Meta(ge=1, description="sequences that run at once")] = 64
    max_waiting: Annotated[int, Meta(ge=1, description="queued choices before 429")] = 1024
    max_waiting_tokens: Annotated[int, Meta(ge=1, description="queued prompt tokens before 429")] = 2**20
    priority_patience: Annotated[
        int, Meta(ge=1, description="later arrivals that may overtake a request, for each level of priority")
    ] = 64


class CacheConfig(Section):
    """The paged key-value cache."""

    bytes: Annotated[int, Meta(ge=2**16, description="size of the cache (default: from free memory)")] | None = None
    page_tokens: Annotated[int, Meta(ge=1, le=1024)] = 16
    prefix_caching: bool = True
    isolation: Annotated[
        Literal["tenant", "none"], Meta(description="who may share cached prefixes: one tenant, or everybody")
    ] = "tenant"


class AdminConfig(Section):
    """The administrative socket."""

    socket: Annotated[
        str, Meta(description="path (default: $XDG_RUNTIME_DIR/infd/admin.sock, or /run/infd/admin.sock as root)")
    ] = ""


class LogConfig(Section):
    """What is written to standard error or the journal."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Annotated[Literal["auto", "plain", "json", "journal"], Meta(description="auto: the journal if it listens")] = (
        "auto"
    )
    access: Annotated[bool, Meta(description="one line per request")] = True
    banner: Annotated[bool, Meta(description="greet on a terminal")] = True


class MetricsConfig(Section):
    """GET /metrics."""

    public: Annotated[bool, Meta(description="readable without a key")] = False
    compat: Annotated[Literal["vllm", "none"], Meta(description="also emit the names that vLLM's dashboards query")] = (
        "vllm"
    )


class Config(Section):
    """All of infd's settings."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    device: DeviceConfig = DeviceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
