"""Settings for operators: admin socket, log, metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from infd.config.section import NotNegative, Section, about


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
