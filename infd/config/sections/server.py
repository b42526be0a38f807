"""Settings of the API: endpoint, bounds of a request, quotas, stored responses, MCP servers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from infd.config.section import Count, Natural, NotNegative, Positive, Section, about

ServerLabel = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}\Z")]
ServerUrl = Annotated[str, Meta(pattern=r"^https?://[^/\s]+\S*\Z")]
Origin = Annotated[str, Meta(pattern=r"^(\*|localhost|[a-z][a-z0-9+.-]*://[^/\s]+)\Z")]


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
    """Rates of API keys and tenants. A key's line in server.api_key_file may give the key other rates."""

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
    """Stored responses and conversations. Beyond a bound, the tenant that stores most loses its oldest entry."""

    path: Annotated[
        str,
        about(
            "SQLite file that keeps the entries across restarts, locked while the server runs; empty: they are kept in"
            " memory, and end with the server"
        ),
    ] = ""
    entries: Annotated[Count, about("most stored responses and conversations", live=True)] = 4096
    bytes: Annotated[
        Count, about("most bytes of entries, and of the events of responses in the background", live=True)
    ] = 256 * 2**20
    age_s: Annotated[Positive, about("longest time for which an unchanged entry is stored", live=True)] = 24 * 3600.0


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
