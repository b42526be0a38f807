"""Every setting, in one frozen tree.

Flags, man page, `infd config show` and validation derive from these Structs.
Facts derived at run time (pages, step_tokens in force) are not settings.
A field whose name ends in `bytes` accepts a unit: "512M", "2G".
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
# Durations are finite: at most 1e9 s (about 30 years), or 1e9 ms.
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
ServerLabel = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}\Z")]
ServerUrl = Annotated[str, Meta(pattern=r"^https?://[^/\s]+\S*\Z")]
Origin = Annotated[str, Meta(pattern=r"^(\*|localhost|[a-z][a-z0-9+.-]*://[^/\s]+)\Z")]


def about(
    description: str,
    *,
    flag: str | None = None,
    alias: str | None = None,
    values: str | None = None,
    live: bool = False,
) -> Meta:
    """Describe a setting.

    flag    command-line option for this setting; None: none
    alias   another server's name of that option; None: none
    values  accepted values, for help; None: derived from the type
    live    whether a reload changes it in a running daemon; otherwise a change takes effect at the next start
    """
    return Meta(description=description, extra={"flag": flag, "alias": alias, "values": values, "live": live})


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the TOML file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """The model to serve."""

    path: Annotated[
        str,
        about(
            "checkpoint directory, GGUF file, hub id such as org/name or org/name:Q4_K_M, or 'embedded'", flag="--model"
        ),
    ] = "embedded"
    hub: Annotated[Literal["huggingface", "modelscope"], about("hub from which a hub id is fetched", flag="--hub")] = (
        "huggingface"
    )
    revision: Annotated[
        str, about("branch, tag or commit of a hub id (default: the hub's main branch)", flag="--revision")
    ] = ""
    chat_template: Annotated[
        str, about("file with the chat template (default: the checkpoint's)", flag="--chat-template")
    ] = ""
    renderer: Annotated[
        str,
        about(
            "what renders conversations: hf: the checkpoint's chat template; a family's name: its renderer; auto: the"
            " renderer found from the checkpoint's files (checkpoints without one, and gpt-oss), or the template",
            flag="--renderer",
            alias="--tokenizer-mode",
            values="auto|hf|NAME",
        ),
    ] = "auto"
    tool_parser: Annotated[
        str,
        about(
            "syntax of the model's tool calls, by infd's name or another server's; auto: found in its chat template",
            flag="--tool-parser",
            alias="--tool-call-parser",
            values="auto|none|NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        about(
            "syntax of the model's thinking, by infd's name or another server's; auto: found in its chat template",
            flag="--reasoning-parser",
            values="auto|none|NAME",
        ),
    ] = "auto"
    served_names: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        about(
            "model names that clients may send; the first is reported (default: from the path)",
            flag="--served-name",
            alias="--served-model-name",
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float", "half"],
        about(
            "type of weights and activations; float is float32, half is float16; auto: the checkpoint's, but on a CPU"
            " bfloat16 or float32, whichever the processor is faster in, and float32 for decoders in float32",
            flag="--dtype",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8", "mxfp4"],
        about(
            "format into which weights are quantized while loading: smaller and faster, less accurate; as `infd"
            " quantize` quantizes them",
            flag="--quantization",
        ),
    ] = "none"
    quantize_vocabulary: Annotated[
        Literal["auto", "none", "int8", "int4"],
        about(
            "format of embedding and head; auto: int8 on a CPU if the other weights are quantized while loading",
            flag="--quantize-vocabulary",
        ),
    ] = "auto"
    exact_activations: Annotated[
        bool,
        about(
            "compute in the model's dtype although the checkpoint's weights are integers: they are decoded, which takes"
            " more memory and is slower; else activations are quantized: as the checkpoint's scheme says, or to int8",
            flag="--exact-activations",
        ),
    ] = False
    weights_root: Annotated[
        str,
        about(
            "directory from which `infdctl load-weights` may load (default: the parent of the model's directory)",
            flag="--weights-root",
            live=True,
        ),
    ] = ""
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        about("longest sequence in tokens, prompt and answer (default: the model's)", flag="--max-model-len"),
    ] = None


class ServerConfig(Section, frozen=True, kw_only=True):
    """The HTTP endpoint."""

    host: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(min_length=1),
        about("addresses to listen on: names, IPv4 and IPv6 addresses, `unix:/path`", flag="--host"),
    ] = ("127.0.0.1",)
    port: Annotated[int, Meta(ge=0, le=65535), about("TCP port; 0 picks a free one", flag="--port")] = 8000
    cors_origins: Annotated[
        tuple[Origin, ...],
        about(
            "web origins allowed to call the API: `https://chat.example`, `localhost` for every port of localhost,"
            " 127.0.0.1 and [::1], or `*` for all; empty: none",
            live=True,
        ),
    ] = ()
    unix_mode: Annotated[
        str, Meta(pattern=r"^0?[0-7]{3}\Z"), about("permission bits of `unix:` sockets, in octal as for chmod")
    ] = "0660"
    api_key_file: Annotated[
        str,
        about(
            "file of API keys, a line each: name:sha256-of-key[:tenant] [in_flight=N] [priority=N]"
            " [requests_per_minute=N] [tokens_per_minute=N], the hash as `printf %s KEY | sha256sum` prints it; see KEY"
            " FILE in infd.toml(5); empty: the credential api-keys of systemd, else INFD_API_KEY, else no keys",
            flag="--api-key-file",
            live=True,
        ),
    ] = ""
    tls_certificate: Annotated[
        str,
        about("PEM file of the certificate and its chain: the TCP addresses speak HTTPS; empty: HTTP", live=True),
    ] = ""
    tls_key: Annotated[str, about("PEM file of the key; empty: it is in the certificate's file", live=True)] = ""
    tls_client_ca: Annotated[
        str, about("PEM file of the authorities whose certificates clients must show; empty: none", live=True)
    ] = ""
    tls_ciphers: Annotated[
        str,
        about("ciphers of TLS 1.2, as OpenSSL's list; those of TLS 1.3 are fixed (default: OpenSSL's)", live=True),
    ] = ""
    tls_min_version: Annotated[Literal["1.2", "1.3"], about("lowest version of TLS", live=True)] = "1.2"
    trusted_proxies: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        about(
            "addresses and networks of reverse proxies, `unix` for Unix sockets: the client is named in their"
            " X-Forwarded-For, and these connections are not limited by max_connections_per_address",
            live=True,
        ),
    ] = ()
    proxy_protocol: Annotated[
        bool, about("connections of trusted_proxies begin with a PROXY header, version 1 or 2; not with TLS", live=True)
    ] = False
    max_connections: Annotated[
        Count, about("most open connections; a new one then closes the longest idle", live=True)
    ] = 4096
    max_connections_per_address: Annotated[
        Count, about("most open connections from one address (IPv6: one /64); raise it behind a proxy", live=True)
    ] = 2048
    header_timeout_s: Annotated[
        Positive, about("longest time from connecting to the end of the first headers", live=True)
    ] = 10.0
    idle_timeout_s: Annotated[Positive, about("longest idle time of a connection between requests", live=True)] = 75.0
    max_body_bytes: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        about(
            "largest request body (default: 64K plus 32 bytes per token of max_model_len, at least 1M; 8M for a model"
            " that generates no text)",
            live=True,
        ),
    ] = None
    body_timeout_s: Annotated[Positive, about("longest time for a request body to arrive", live=True)] = 30.0
    body_pace: Annotated[
        Count, about("bytes per second at which a large body may exceed body_timeout_s", live=True)
    ] = 2**16
    max_bodies_bytes: Annotated[
        int, Meta(ge=1024), about("most bytes of request bodies arriving at once, then 429", live=True)
    ] = 256 * 2**20
    queue_timeout_s: Annotated[
        Positive | None, about("longest wait for the first step, then 503 (default: no limit)", live=True)
    ] = None
    request_timeout_s: Annotated[
        Positive | None, about("longest time for a request, then 504 or an error event (default: no limit)", live=True)
    ] = None
    hold_timeout_s: Annotated[
        Positive, about("longest wait of a new request while the server is paused or waking, then 503", live=True)
    ] = 300.0
    wake_on_request: Annotated[
        bool, about("wake on a request, if the server was put to sleep while ready", live=True)
    ] = False
    idle_sleep_s: Annotated[
        Positive | None,
        about("sleep after this time without requests; a request wakes the server (default: never)", live=True),
    ] = None
    idle_sleep_level: Annotated[
        int,
        Meta(ge=1, le=2),
        about(
            "level of the sleep after idle_sleep_s: 1 releases the cache, and moves a GPU's weights to host memory;"
            " 2 drops the weights too",
            live=True,
        ),
    ] = 1
    idle_exit_s: Annotated[
        Positive | None,
        about(
            "exit after this time without requests; systemd's sockets (infd.socket), which it needs, start infd again"
            " for the next connection (default: never)"
        ),
    ] = None
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"],
        about(
            "log-probabilities that answers report, unless a request says: of the model's logits, or after penalties,"
            " bias, masks, temperature and limits; the logits themselves, or normalized",
            flag="--logprobs-mode",
            live=True,
        ),
    ] = "raw_logprobs"
    drain_timeout_s: Annotated[
        NotNegative, about("longest time for requests in flight to finish after TERM", live=True)
    ] = 60.0


class LimitsConfig(Section, frozen=True, kw_only=True):
    """Bounds on one request."""

    choices: Annotated[Count, about("largest n", live=True)] = 128
    beams: Annotated[Count, about("most beams of a beam search", live=True)] = 16
    stop_strings: Annotated[Natural, about("most stop strings", live=True)] = 16
    stop_characters: Annotated[Count, about("longest stop string", live=True)] = 256
    logit_bias: Annotated[Natural, about("most entries of logit_bias", live=True)] = 1024
    bad_words: Annotated[Natural, about("most entries of bad_words", live=True)] = 1024
    top_logprobs: Annotated[Natural, about("most alternatives reported per token", live=True)] = 20
    prompt_logprobs_bytes: Annotated[
        Count,
        about(
            "largest answer with logprobs of prompt tokens (prompt_logprobs, or echo with logprobs), estimated as"
            " 128 bytes x n x tokens x (prompt_logprobs + 1)",
            live=True,
        ),
    ] = 128 * 2**20
    routed_experts_bytes: Annotated[
        Count,
        about(
            "most bytes of the experts of prompt tokens in an answer (return_routed_experts): 2 x n x tokens"
            " x layers with experts x experts chosen in each",
            live=True,
        ),
    ] = 128 * 2**20
    pooled_bytes: Annotated[
        Count,
        about("largest answer of embeddings or scores, as 4 bytes x dimensions x inputs, or x tokens", live=True),
    ] = 64 * 2**20
    cache_salt: Annotated[Natural, about("longest cache_salt, in characters", live=True)] = 128
    json_depth: Annotated[int, Meta(ge=8), about("deepest nesting of a request body", live=True)] = 128


class QuotasConfig(Section, frozen=True, kw_only=True):
    """What API keys and tenants may use. A key's line in server.api_key_file may give the key other rates."""

    requests_per_minute: Annotated[
        Count | None,
        about("inference requests a minute of each API key, then 429 (default: no limit)", live=True),
    ] = None
    tokens_per_minute: Annotated[
        Count | None,
        about(
            "tokens a minute of each API key, prompt and answer, then 429; a request reserves its prompt and"
            " max_tokens, and returns what it does not use (default: no limit)",
            live=True,
        ),
    ] = None
    burst_s: Annotated[Positive, about("seconds' worth of a rate that may be used at once", live=True)] = 60.0
    tenants: Annotated[
        dict[str, str],
        about(
            "rates of all keys of a tenant together, and its share of the device while others wait too (default: 1):"
            " the tenant and `requests_per_minute=N tokens_per_minute=N share=X`, in any order, as in"
            ' `{red = "share=2", blue = "tokens_per_minute=9000"}`',
            live=True,
        ),
    ] = {}


class StoreConfig(Section, frozen=True, kw_only=True):
    """Stored responses and conversations. Beyond a bound, the tenant with most loses its oldest."""

    path: Annotated[
        str,
        about(
            "SQLite file that keeps them across restarts, locked while the server runs; empty: memory, until the end"
        ),
    ] = ""
    entries: Annotated[Count, about("most stored responses and conversations", live=True)] = 4096
    bytes: Annotated[
        Count, about("most bytes of them, and of the events of responses in the background", live=True)
    ] = 256 * 2**20
    age_s: Annotated[Positive, about("longest time for which one is stored unchanged", live=True)] = 24 * 3600.0


class McpConfig(Section, frozen=True, kw_only=True):
    """MCP servers whose tools a response may call. Clients name servers of this table, and no other URL."""

    servers: Annotated[
        dict[ServerLabel, ServerUrl],
        about("MCP servers: label and URL of the streamable HTTP endpoint", flag="--mcp-server"),
    ] = {}
    tools: Annotated[
        dict[str, str],
        about("tools that may be called: a server's label, and names separated by blanks (default: all of its tools)"),
    ] = {}
    header_files: Annotated[
        dict[str, str],
        about(
            "files with request headers such as `Authorization: Bearer TOKEN`, one a line: a server's label and path"
        ),
    ] = {}
    timeout_s: Annotated[Positive, about("longest time for listing a server's tools, and for one call")] = 30.0
    answer_bytes: Annotated[
        Annotated[int, Meta(ge=2**10)], about("most bytes read of a server's answer to one request")
    ] = 2**20
    list_age_s: Annotated[NotNegative, about("time for which a server's list of tools is kept")] = 300.0
    calls: Annotated[Count, about("most calls of servers' tools in one response")] = 32
    connections: Annotated[Count, about("most requests in progress at one server; further ones wait")] = 32


class DeviceConfig(Section, frozen=True, kw_only=True):
    """The device that runs the model."""

    kind: Annotated[
        str,
        Meta(pattern=r"^(auto|cpu|cuda(:\d{1,3})?|null)\Z"),
        about(
            "device to run on; 'cuda:1' is the second GPU, 'null' computes nothing",
            flag="--device",
            values="auto|cpu|cuda|cuda:N|null",
        ),
    ] = "auto"
    # Bounded, because libgomp exits the process, without a Python exception, if the system refuses a thread.
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, about("compute threads on a CPU (default: cores)")
    ] = None
    depth: Annotated[
        Annotated[int, Meta(ge=1, le=8)] | None, about("steps in flight (default: 1 on a CPU, 2 on a GPU)")
    ] = None
    memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        about("fraction of the GPU memory free at start, for weights, steps and cache together"),
    ] = 0.9
    graphs: Annotated[bool, about("capture decoding steps as CUDA graphs and replay them")] = True
    flashinfer: Annotated[bool, about("prefer FlashInfer's kernels to Triton's on a GPU, where both can be used")] = (
        False
    )
    kernel_cache: Annotated[
        str,
        about(
            "directory of compiled GPU kernels and of calibration.json, the measured step times; remove that file to"
            " measure again (default: kernels in systemd's $CACHE_DIRECTORY, else in"
            " $XDG_CACHE_HOME/infd)"
        ),
    ] = ""
    own_process: Annotated[
        bool, about("run the device in a process of its own; losing that process still ends the daemon")
    ] = False
    null_step_ms: Annotated[NotNegative, about("duration of a step on the null device")] = 0.0


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """How steps are filled."""

    step_tokens: Annotated[Count | None, about("most tokens in one step (default: measured at start)")] = None
    step_target_ms: Annotated[
        Positive | None,
        about(
            "longest step (default: 150 on a CPU, 50 on a GPU; while streams decode and at most 8 prompts wait: 50,"
            " or 1.75 times the shortest step if that is more)"
        ),
    ] = None
    max_num_seqs: Annotated[Count, about("most running sequences", flag="--max-num-seqs")] = 64
    speculative: Annotated[
        Literal["off", "ngram", "suffix"],
        about(
            "guess tokens and verify several in one step where that is faster; answers stay the same; ngram: guess what"
            " followed the last tokens earlier in the request; suffix (recommended): also in earlier answers of the"
            " same tenant; both: the request's prediction, and what its grammar forces",
            flag="--speculative",
        ),
    ] = "off"
    speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=15)], about("most guessed tokens of a request in one step")
    ] = 7
    speculative_bytes: Annotated[
        Annotated[int, Meta(ge=2**20)], about("memory for earlier answers; with speculative suffix")
    ] = 2**26
    max_waiting: Annotated[
        Count, about("most queued choices, then 429, except for tenants that hold less than their share", live=True)
    ] = 4096
    max_waiting_tokens: Annotated[
        Count,
        about("most queued prompt tokens, then 429, except for tenants that hold less than their share", live=True),
    ] = 2**20
    max_routed_bytes: Annotated[
        Count,
        about("most bytes that the answers of all requests with return_routed_experts may report, then 429", live=True),
    ] = 512 * 2**20
    priority_patience: Annotated[
        Count,
        about(
            "later arrivals that may overtake a request, for each level of priority; half as many a long text to pool"
        ),
    ] = 64


class CacheConfig(Section, frozen=True, kw_only=True):
    """The paged key-value cache."""

    bytes: Annotated[
        Annotated[int, Meta(ge=2**16)] | None,
        about(
            "size of the cache (default: from free memory)", flag="--kv-cache-bytes", alias="--kv-cache-memory-bytes"
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"],
        about(
            "type of cached keys and values; auto: that of activations, the only float type allowed; int8 on a CPU,"
            " fp8 (fp8_e4m3) on a GPU",
            flag="--kv-cache-dtype",
        ),
    ] = "auto"
    page_tokens: Annotated[int, Meta(ge=1, le=1024), about("tokens in one page")] = 16
    prefix_caching: Annotated[bool, about("reuse cached pages between prompts with a common prefix")] = True
    isolation: Annotated[
        Literal["tenant", "none"], about("share cached prefixes within a tenant only, or (none) between all")
    ] = "tenant"


class PoolingConfig(Section, frozen=True, kw_only=True):
    """How prompts become embeddings or scores. Unset, the checkpoint's files say it."""

    task: Annotated[
        Literal["auto", "generate", "embed", "classify"],
        about(
            "what the model is for; auto: a model with a language model head generates, unless it has a modules.json as"
            " sentence-transformers writes it; other models pool",
            flag="--task",
            alias="--runner",
        ),
    ] = "auto"
    mode: Annotated[
        Literal["auto", "cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"],
        about("how the hidden states of a prompt become one vector, in sentence-transformers' words", flag="--pooling"),
    ] = "auto"
    normalize: Annotated[
        Literal["auto", "yes", "no"], about("whether embeddings are divided by their length, unless a request says so")
    ] = "auto"
    activation: Annotated[
        Literal["auto", "softmax", "sigmoid", "none"], about("function from the logits of labels to their scores")
    ] = "auto"
    label_tokens: Annotated[
        tuple[str, ...],
        about(
            "tokens whose logits after the prompt are the labels of a model that has no head for labels: no,yes for"
            " Qwen3-Reranker. Of two, the score is that of the second against the first"
        ),
    ] = ()


class GrammarConfig(Section, frozen=True, kw_only=True):
    """Structured output."""

    engine: Annotated[
        Literal["auto", "llguidance", "xgrammar"],
        about(
            "library that compiles grammars; auto: llguidance; xgrammar is in the extra infd[xgrammar]",
            flag="--grammar-engine",
        ),
    ] = "auto"
    cache_bytes: Annotated[
        Annotated[int, Meta(ge=2**20)], about("memory for compiled grammars; unused ones are evicted")
    ] = 2**28


class LoraConfig(Section, frozen=True, kw_only=True):
    """LoRA adapters, each served under its own model name."""

    modules: Annotated[dict[str, str], about("adapters to load at start: name and PEFT directory", flag="--lora")] = {}
    root: Annotated[
        str,
        about(
            "directory from which `infdctl load-lora` may load; empty: none, or for the embedded model its adapters",
            flag="--lora-root",
            live=True,
        ),
    ] = ""
    max_adapters: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], about("most adapters in device memory; others are swapped in on use")
    ] = 16
    max_adapters_per_step: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], about("most adapters in one step; requests for others wait")
    ] = 16
    host_bytes: Annotated[
        Annotated[int, Meta(ge=2**10)],
        about("host memory for adapters; unused adapters are evicted, and read again on use"),
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
    """The log, written to standard error or the journal."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"], about("lowest level logged", flag="--log-level", live=True)
    ] = "info"
    format: Annotated[Literal["auto", "plain", "json", "journal"], about("auto: journal under systemd, else plain")] = (
        "auto"
    )
    access: Annotated[bool, about("log one line per request", live=True)] = True
    slow_s: Annotated[
        NotNegative | None,
        about("log inference requests that take longer, with the time of each stage (default: none)", live=True),
    ] = None
    banner: Annotated[bool, about("print a banner on a terminal", flag="--no-banner")] = True


class MetricsConfig(Section, frozen=True, kw_only=True):
    """The metrics of GET /metrics."""

    public: Annotated[bool, about("serve /metrics without an API key", live=True)] = False
    compat: Annotated[Literal["vllm", "none"], about("also emit metrics under vLLM's names", live=True)] = "vllm"


class Config(Section, frozen=True, kw_only=True):
    """All of infd's settings."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    limits: LimitsConfig = LimitsConfig()
    quotas: QuotasConfig = QuotasConfig()
    store: StoreConfig = StoreConfig()
    mcp: McpConfig = McpConfig()
    device: DeviceConfig = DeviceConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    pooling: PoolingConfig = PoolingConfig()
    grammar: GrammarConfig = GrammarConfig()
    lora: LoraConfig = LoraConfig()
    admin: AdminConfig = AdminConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()
