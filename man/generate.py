"""Generate the man pages from the click commands and the settings.

python man/generate.py          writes all pages beside this file
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from references import http_page, metrics_page, vllm_page
from roff import UNBROKEN, escaped

from infd.admin.ctl import cli as infdctl
from infd.cli import cli as infd
from infd.config import SETTINGS, Config
from infd.kernels.select import CACHED, CANDIDATES, QUANTIZED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.kernels.select import Candidate

DIRECTORY = Path(__file__).parent

INFD_END = r"""
.SH SIGNALS
.TP
.B TERM
Readiness fails; requests in flight have server.drain_timeout_s to finish; then error events end the remaining streams.
.TP
.BR INT ", or a second " TERM
End every stream with an error event at once; exit within 2 seconds.
.TP
.B QUIT
Write the stacks of all tasks and threads to the log; exit 134.
.TP
.B USR1
Write the status and one line for each request to the log.
.TP
.B HUP
Read settings and API keys again, and change those that may change while infd runs, all or none. The log names others.
.B infdctl reload
does the same and reports the changes.
.SH EXIT STATUS
.TP
.B 0
Stopped by a signal or infdctl, with no request cut off.
.TP
.B 64
Bad command line.
.TP
.B 65
.BR "infd chat" :
the schema's file holds no schema, or the server refused the request;
.BR "infd run-batch" :
a file is malformed, or some lines were answered with an error.
.TP
.B 69
The device is missing; or no server answered
.BR "infd chat" .
.TP
.B 70
Internal error, or the device was lost.
.TP
.B 71
Out of memory, or the address or the admin socket is taken.
.TP
.B 74
The model could not be fetched from its hub, or a batch's output could not be written; a later attempt may succeed.
.TP
.B 75
Stopped, and requests were cut off when the drain timed out, or lines of a batch remain.
.TP
.B 77
.BR "infd chat" :
the server wants an API key, or refused the given key.
.TP
.B 78
Bad configuration or checkpoint.
.SH ENVIRONMENT
.TP
.B INFD_SECTION__KEY
Any setting, for instance INFD_SERVER__PORT=9000. Overrides files; flags override it.
.TP
.B INFD_API_KEY
One key for all clients, if no key file is set; also the key that
.B infd chat
sends to a server.
.TP
.BR HF_HOME ", " HF_HUB_CACHE ", " HF_TOKEN ", " HF_ENDPOINT ", " HF_HUB_OFFLINE
Settings of the Hugging Face library: directories of fetched models, access token, address of the hub, and whether to
work offline.
.TP
.B XDG_RUNTIME_DIR
The directory of the admin socket, infd/admin.sock, unless RUNTIME_DIRECTORY or admin.socket is set. Without
XDG_RUNTIME_DIR a user's admin socket is in /tmp/infd\-UID, which no other user may own, and root's in /run/infd.
.TP
.B XDG_STATE_HOME
The directory in which
.B infd chat
stores typed lines, as infd/chat_history. Default: ~/.local/state.
.TP
.BR NOTIFY_SOCKET ", " WATCHDOG_USEC ", " JOURNAL_STREAM ", " CREDENTIALS_DIRECTORY ", " RUNTIME_DIRECTORY
Set by systemd. The credential api-keys is the key file if no other is set.
.TP
.BR LISTEN_FDS ", " LISTEN_PID
Sockets passed by systemd; infd listens on these instead of server.host.
.SH FILES
.TP
.I /etc/infd/infd.toml
Settings; see
.BR infd.toml (5).
.TP
.I /etc/infd/conf.d/*.toml
More settings, in the order of their names; the later file wins, key by key.
.SH EXAMPLES
.TP
.B infd start
Serve the embedded model on http://127.0.0.1:8000.
.TP
.B infd start \-\-model /srv/qwen3 \-\-served\-name qwen3 \-\-port 8080 \-\-admin\-socket /tmp/qwen3.sock
Serve a checkpoint, while another daemon runs.
.TP
.B INFD_API_KEY=secret infd start \-\-host 0.0.0.0 \-\-set server.drain_timeout_s=10
Listen on all addresses; clients need the key.
.TP
.B infd chat \-\-url http://127.0.0.1:8080 \-\-system "Be brief."
Chat with a running daemon.
.TP
.B infd chat < question.txt > answer.txt
Ask one question.
.TP
.B infd chat \-\-schema shape.json < question.txt > answer.json
Get an answer that satisfies a JSON schema.
.TP
.B infd run\-batch \-i in.jsonl \-o out.jsonl
Answer a file of requests; the same command continues a run that was stopped.
.SH SEE ALSO
.BR infdctl (1),
.BR infd.toml (5),
.BR infd\-http (7),
.BR infd\-metrics (7),
.BR infd\-vllm (7)
"""

INFDCTL_END = r"""
.SH EXIT STATUS
0 done, 1 refused or failed, 2 usage, 3 no daemon reached, 4 wrong state, 5 timed out.
.SH ENVIRONMENT
.TP
.B INFD_ADMIN_SOCKET
The daemon's admin socket, unless
.B \-\-socket
is given.
.TP
.B XDG_RUNTIME_DIR
infdctl looks for the admin socket as infd/admin.sock in this directory, then in /tmp/infd\-UID, then in /run/infd.
.TP
.B NO_COLOR
Disables colours.
.SH EXAMPLES
.TP
.B infdctl ps \-\-json | jq \-r \(aq.requests[].id\(aq
The ids of all requests in flight, for
.BR "infdctl abort" .
.TP
.B infdctl drain \-\-wait \-\-timeout 90
Stop the daemon once it has answered what it accepted.
.TP
.B infdctl bench \-\-url http://127.0.0.1:8080 \-\-concurrency 8 \-\-requests 64
Measure any OpenAI-compatible server.
.SH SEE ALSO
.BR infd (1),
.BR infd\-http (7),
.BR infd\-metrics (7)
"""

TOML_START = r""".TH INFD.TOML 5 "" "infd" "infd"
.nh
.ad l
.SH NAME
infd.toml \- settings of infd
.SH DESCRIPTION
Each source of settings overrides the preceding sources: built-in values, then
.IR /etc/infd/infd.toml ,
then
.I /etc/infd/conf.d/*.toml
in the order of their names, then the environment as INFD_SECTION__KEY, then the command line.
An unknown key is an error. A SIZE is a number of bytes, or a string like "512M" or "2G", in powers of 1024.
Settings marked live change on HUP and
.BR "infdctl reload" ,
or until then with
.BR "infdctl config set" ;
the others at the next start.
.B infd config check
checks all sources;
.B infd config show --origin
shows the value and the source of each setting.
"""


TOML_END = r"""
.SH EXAMPLE
.EX
[model]
path = "/srv/models/qwen3"
served_names = ["qwen3", "default"]

[server]
host = ["127.0.0.1", "::1"]
port = 8080
api_key_file = "/etc/infd/api\-keys"

[cache]
bytes = "8G"
.EE
.SH KEY FILE
server.api_key_file names a file with one client a line; blank lines and lines that begin with # are skipped:
.PP
.RS
name:sha256\-of\-key[:tenant] [in_flight=N] [priority=N] [requests_per_minute=N] [tokens_per_minute=N]
.RE
.PP
The hash is 64 hex digits, as
.B printf %s \(dq$key\(dq | sha256sum
prints them. Clients of one tenant share cached prompts, and a share of a busy server; the tenant defaults to the name.
.TP
.B in_flight
Maximum requests in flight; further requests are answered with 429.
.TP
.B priority
The earliest priority that requests with this key may set; lower numbers are earlier. A request with an earlier
priority is answered with 400.
A request without a priority gets 0, or this priority if it is later.
.TP
.BR requests_per_minute ", " tokens_per_minute
The key's rates, instead of those of the section quotas; beyond them requests are answered with 429.
.SH SEE ALSO
.BR infd (1)
"""


def pages() -> dict[str, str]:
    """Return the text of each page, by file name."""
    return {
        "infd.1": command_page("infd", infd, "\n" + "\n".join(_kernels()) + INFD_END),
        "infdctl.1": command_page("infdctl", infdctl, INFDCTL_END),
        "infd.toml.5": settings_page(),
        "infd-http.7": http_page(),
        "infd-metrics.7": metrics_page(),
        "infd-vllm.7": vllm_page(),
    }


def command_page(name: str, command: click.Command, end: str) -> str:
    """Return the page of one program and all its subcommands."""
    summary, *details = _paragraphs(command)
    lines = [
        f'.TH {name.upper()} 1 "" "infd" "infd"',
        *UNBROKEN,
        ".SH NAME",
        f"{name} \\- {_uncapitalised(summary)}",
        ".SH SYNOPSIS",
    ]
    lines += [f".B {name}", r"[\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGS\fR]...", ".SH DESCRIPTION", escaped(summary)]
    for paragraph in details:
        lines += [".PP", escaped(paragraph)]
    context = click.Context(command, info_name=name, **command.context_settings)
    if options := list(_options(command, context)):
        lines += [".SH OPTIONS", *options]
    lines.append(".SH COMMANDS")
    lines += _commands(command, context)
    return "\n".join(lines) + end


def settings_page() -> str:
    """Return the page of the configuration file."""
    lines = [TOML_START.rstrip()]
    section = ""
    for key, setting in SETTINGS.items():
        table, _, name = key.partition(".")
        if table != section:
            section = table
            struct = Config.__annotations__[table]
            lines += [f".SH [{table}]", escaped(_struct(struct).__doc__ or "")]
        lines += [".TP", rf".BI {escaped(name)} \~=\~ {escaped(setting.values)}"]
        default = f" Default: {setting.default_text}." if setting.default_text else ""
        flags = " or ".join(flag for flag in (setting.flag, setting.alias) if flag)
        flag = f" Flag: {flags}." if flags else ""
        live = " Live." if setting.live else ""
        lines.append(escaped(setting.sentence + default + flag + live))
    return "\n".join(lines) + TOML_END


def _kernels() -> Iterator[str]:
    """Yield the section that lists each kernel family's candidates, with their devices and types."""
    yield ".SH KERNELS"
    yield escaped(
        "The kernels of each family, best first, with the devices and the types of activations that each supports."
        " Attention stores keys and values in the type of the activations, unless listed for another cache. infd uses"
        " the first kernel whose requirements are met; infdctl ops shows it, and the unmet requirements of the others."
    )
    families: dict[str, Sequence[Candidate]] = {
        **CANDIDATES,
        **{f"linear, vocabulary: weights of {how}": some for how, some in QUANTIZED.items()},
        **{f"attention: a cache of {how}": CACHED[how]["attention"] for how in ("int8", "fp8")},
    }
    for family, some in families.items():
        yield ".TP"
        yield f".B {escaped(family)}"
        yield escaped("; ".join(map(_ability, some)) + ".")


def _ability(candidate: Candidate) -> str:
    kinds = {"cpu": "a CPU", "cuda": "a GPU"}
    where = " and ".join(kinds[kind] for kind in candidate.kinds) or "any device"
    return f"{candidate.name}: {where}, {' and '.join(candidate.dtypes) or 'any type'}"


def _struct(annotation: str) -> type:
    import infd.config

    found: type = getattr(infd.config, annotation)
    return found


def _commands(group: click.Command, context: click.Context) -> Iterator[str]:
    assert isinstance(group, click.Group)
    for name in group.list_commands(context):
        command = group.commands[name]
        inner = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _commands(command, inner)
            continue
        yield f".SS {escaped(inner.command_path)} {escaped(' '.join(command.collect_usage_pieces(inner)))}"
        for number, paragraph in enumerate(_paragraphs(command)):
            if number:
                yield ".PP"
            yield escaped(paragraph)
        yield from _options(command, inner)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            usage, text = record
            yield ".TP"
            yield f".B {escaped(usage)}"
            yield escaped(" ".join(text.split()))


def _paragraphs(command: click.Command) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (command.help or "").strip().split("\n\n")]


def _uncapitalised(text: str) -> str:
    return escaped(text[:1].lower() + text[1:].rstrip("."))


if __name__ == "__main__":
    for name, page in pages().items():
        (DIRECTORY / name).write_text(page, encoding="utf-8")
