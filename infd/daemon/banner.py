"""Announce readiness: on a terminal a banner with a first request to paste, elsewhere one log line."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Final

from msgspec import Struct

from infd.version import __version__

log = logging.getLogger("infd.daemon")

EMBEDDED_NOTE: Final = "the small model that ships with infd; --model serves another"


class Readiness(Struct, frozen=True):
    """The fields of the banner and of the log line.

    addresses     addresses that the HTTP endpoint has bound
    url           URL of the endpoint for a client on this machine
    ready_s       seconds from the start of the process until readiness
    key           whether clients need an API key
    embedded      whether the model is the embedded model
    quantization  type to which the weights were quantized while loading; "none": not quantized
    vocabulary    stored type of embedding and head; empty: the type of the other weights
    cache_dtype   type of the cached keys and values; empty: unknown
    """

    model: str
    device: str
    dtype: str
    addresses: tuple[str, ...]
    url: str
    admin: str
    ready_s: float
    key: bool
    embedded: bool
    quantization: str = "none"
    vocabulary: str = ""
    cache_dtype: str = ""

    @property
    def quantized(self) -> dict[str, str]:
        """The stored types to report beside `dtype`, by what is stored: weights, vocabulary, cache."""
        cache = "" if self.cache_dtype == self.dtype else self.cache_dtype
        types = {"weights": self.quantization, "vocabulary": self.vocabulary, "cache": cache}
        return {name: kind for name, kind in types.items() if kind not in ("none", "")}


def announce_ready(ready: Readiness, *, banner: bool) -> None:
    """Announce that the daemon is ready, with a banner or as a log line."""
    if banner:
        _paint(ready)
        return
    log.info(
        "ready",
        extra={
            "version": __version__,
            "model": ready.model,
            "device": ready.device,
            "dtype": ready.dtype,
            **ready.quantized,
            "address": " ".join(ready.addresses),
            "admin": ready.admin,
            "ready_s": round(ready.ready_s, 3),
            **({"note": EMBEDDED_NOTE} if ready.embedded else {}),
        },
    )


def _paint(ready: Readiness) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("model", Text(ready.model, "bold"))  # not a str, in which rich would interpret markup
    if ready.embedded:
        table.add_row("", EMBEDDED_NOTE)
    quantized = (f"{name} {kind}" for name, kind in ready.quantized.items())
    table.add_row("device", ", ".join(filter(None, (ready.device, ready.dtype, *quantized))))
    table.add_row("address", Text("\n".join(ready.addresses)))
    table.add_row("admin", Text(ready.admin))
    table.add_row("ready in", f"{ready.ready_s:.2f} s")
    console = Console(stderr=True, highlight=False)
    console.print(f"\n[bold]infd {__version__}[/bold]")
    console.print(table)
    console.print()
    console.print(first_request(ready), soft_wrap=True, markup=False)
    console.print(f"\nor talk to it:\n{first_chat(ready)}", soft_wrap=True, markup=False)
    console.print()


def first_request(ready: Readiness) -> str:
    """Return a curl command, split into short lines, to paste into another terminal."""
    path = ready.url.removeprefix("unix:")
    where = ready.url if path == ready.url else f"--unix-socket {shlex.quote(path)} http://localhost"
    key = ("-H 'Authorization: Bearer YOUR_KEY'",) if ready.key else ()
    body = f"""{{"model": {json.dumps(ready.model)}, "max_tokens": 32,
       "messages": [{{"role": "user", "content": "Hello!"}}]}}"""
    lines = (
        f"curl {where}/v1/chat/completions",
        "-H 'Content-Type: application/json'",
        *key,
        f"-d {shlex.quote(body)}",
    )
    return " \\\n  ".join(lines)


def first_chat(ready: Readiness) -> str:
    """Return the `infd chat` command that connects to this daemon."""
    key = "INFD_API_KEY=YOUR_KEY " if ready.key else ""
    return f"{key}{_program()} chat --url {shlex.quote(ready.url)}"


def _program() -> str:
    """Return the word that starts infd in a shell: `infd` if it is on PATH, else its path."""
    own = Path(sys.executable).with_name("infd")
    found = shutil.which("infd")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "infd"
    near = own.is_relative_to(Path.cwd())
    return shlex.quote(str(own.relative_to(Path.cwd()) if near else own))


def process_age_s() -> float:
    """Return the seconds since the kernel started this process, which include the start of the interpreter."""
    # Field 22 of stat is the time of the start, in clock ticks since boot. Fields are counted from the last parenthesis
    # on, because field 2, the program's name in parentheses, may contain spaces.
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")
