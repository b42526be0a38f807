"""Generate the man pages from the click commands and the settings.

python man/generate.py          writes infd.1, infdctl.1 and infd.toml.5 beside this file
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from infd.admin.ctl import cli as infdctl
from infd.cli import cli as infd
from infd.config import SETTINGS, Config
from infd.kernels.select import CACHED, CANDIDATES, QUANTIZED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.kernels.select import Candidate

DIRECTORY = Path(__file__).parent

# No hyphenation, so that options and paths can be copied; left-aligned, for even spacing.
UNBROKEN = (".nh", ".ad l")

INFD_END = r"""
.SH SIGNALS
.TP
.B TERM
Readiness fails, requests in flight get server.drain_timeout_s to finish, then error events end what is left.
.TP
.BR INT ", or a second " TERM
Error events to every stream at once; exit within 2 seconds.
.TP
.B QUIT
Write the stacks of all tasks and threads to the log; exit 134.
.TP
.B USR1
Write the status and one line for each request to the log.
.TP
.B HUP
Not acted upon: settings are read at start only.
.SH EXIT STATUS
.TP
.B 0
Told to stop, and stopped.
.TP
.B 64
Bad command line.
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
A hub did not hand over the model; it may later.
.TP
.B 75
Told to stop, and requests were cut off when the drain timed out.
.TP
.B 78
Bad configuration or checkpoint.
.SH ENVIRONMENT
.TP
.B INFD_SECTION__KEY
Any setting, for instance INFD_SERVER__PORT=9000. Stronger than files, weaker than flags.
.TP
.B INFD_API_KEY
One key for all clients, where no key file is given; the key that
.B infd chat
shows to a server.
.TP
.BR HF_HOME ", " HF_HUB_CACHE ", " HF_TOKEN ", " HF_ENDPOINT ", " HF_HUB_OFFLINE
Where models of the Hugging Face hub are kept, whose access is used, where the hub is, and whether it may be asked at
all.
.TP
.B XDG_RUNTIME_DIR
Where the admin socket is made, in infd/admin.sock, unless RUNTIME_DIRECTORY or admin.socket says otherwise. Without it
a user's is in /tmp/infd\-UID, which must be that user's alone, and root's in /run/infd.
.TP
.B XDG_STATE_HOME
Where
.B infd chat
keeps the lines typed, in infd/chat_history; without it in ~/.local/state.
.TP
.BR NOTIFY_SOCKET ", " WATCHDOG_USEC ", " JOURNAL_STREAM ", " CREDENTIALS_DIRECTORY ", " RUNTIME_DIRECTORY
As set by systemd. The credential api-keys is the key file where no other is set.
.TP
.BR LISTEN_FDS ", " LISTEN_PID
Sockets that systemd passes, which are listened on instead of server.host.
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
Serve a checkpoint, beside another daemon.
.TP
.B INFD_API_KEY=secret infd start \-\-host 0.0.0.0 \-\-set server.drain_timeout_s=10
Listen on all addresses, to clients that know the key.
.TP
.B infd chat \-\-url http://127.0.0.1:8080 \-\-system "Be brief."
Talk to a daemon.
.TP
.B infd chat < question.txt > answer.txt
Ask one thing.
.SH SEE ALSO
.BR infdctl (1),
.BR infd.toml (5)
"""

INFDCTL_END = r"""
.SH EXIT STATUS
0 done, 1 refused or failed, 2 usage, 3 no daemon reached, 4 wrong state, 5 timed out.
.SH ENVIRONMENT
.TP
.B INFD_ADMIN_SOCKET
The daemon's admin socket, where
.B \-\-socket
does not name it.
.TP
.B XDG_RUNTIME_DIR
Where the socket is looked for first, as infd/admin.sock; then in /tmp/infd\-UID, then in /run/infd.
.TP
.B NO_COLOR
No colours, whatever the terminal can show.
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
.BR infd (1)
"""

TOML_START = r""".TH INFD.TOML 5 "" "infd" "infd"
.nh
.ad l
.SH NAME
infd.toml \- settings of infd
.SH DESCRIPTION
Each setting is taken from the strongest place that names it: built-in values, then
.IR /etc/infd/infd.toml ,
then
.I /etc/infd/conf.d/*.toml
in the order of their names, then the environment as INFD_SECTION__KEY, then the command line.
An unknown key is an error. A SIZE is a number of bytes or such as "512M" or "2G", in powers of 1024.
Every change needs a restart.
.B infd config check
checks all places;
.B infd config show --origin
shows what is in force and why.
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
name:sha256\-of\-key[:tenant] [in_flight=N] [priority=N]
.RE
.PP
The hash is 64 hex digits, as
.B printf %s \(dq$key\(dq | sha256sum
prints them. Clients of one tenant share cached prompts; the tenant is the name unless given.
.TP
.B in_flight
The most requests at once; one more is answered with 429.
.TP
.B priority
The earliest priority that requests of this key may ask for, where lower is earlier; an earlier one is answered
with 400.
A request that asks for none gets 0, or this one where it is later.
.SH SEE ALSO
.BR infd (1)
"""


def pages() -> dict[str, str]:
    """Return the text of each page, by file name."""
    return {
        "infd.1": command_page("infd", infd, "\n" + "\n".join(_kernels()) + INFD_END),
        "infdctl.1": command_page("infdctl", infdctl, INFDCTL_END),
        "infd.toml.5": settings_page(),
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
    lines += [f".B {name}", r"[\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGS\fR]...", ".SH DESCRIPTION", _text(summary)]
    for paragraph in details:
        lines += [".PP", _text(paragraph)]
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
            lines += [f".SH [{table}]", _text(_struct(struct).__doc__ or "")]
        lines += [".TP", rf".BI {_text(name)} \~=\~ {_text(setting.values)}"]
        default = f" Default: {setting.default_text}." if setting.default_text else ""
        flag = f" Flag: {setting.flag}." if setting.flag else ""
        lines.append(_text(_sentence(setting.help) + default + flag))
    return "\n".join(lines) + TOML_END


def _kernels() -> Iterator[str]:
    """Yield the tables of kernels, with devices and types, from which `infd start` chooses."""
    yield ".SH KERNELS"
    yield _text(
        "Of each family, best first: on which devices a kernel runs, and in which types of activations. Attention keeps"
        " keys and values in that type, unless it is listed for another cache. The first that lacks nothing is used;"
        " infdctl ops shows which, and what the others lack."
    )
    families: dict[str, Sequence[Candidate]] = {
        **CANDIDATES,
        **{f"linear, vocabulary: weights of {how}": some for how, some in QUANTIZED.items()},
        **{f"attention: a cache of {how}": CACHED[how]["attention"] for how in ("int8", "fp8")},
    }
    for family, some in families.items():
        yield ".TP"
        yield f".B {_text(family)}"
        yield _text("; ".join(map(_ability, some)) + ".")


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
        yield f".SS {_text(inner.command_path)} {_text(' '.join(command.collect_usage_pieces(inner)))}"
        for number, paragraph in enumerate(_paragraphs(command)):
            if number:
                yield ".PP"
            yield _text(paragraph)
        yield from _options(command, inner)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            usage, text = record
            yield ".TP"
            yield f".B {_text(usage)}"
            yield _text(" ".join(text.split()))


def _paragraphs(command: click.Command) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (command.help or "").strip().split("\n\n")]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _uncapitalised(text: str) -> str:
    return _text(text[:1].lower() + text[1:].rstrip("."))


def _text(text: str) -> str:
    """Escape roff's control characters, and keep ASCII hyphens so that options can be copied."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("…", "...")
    return r"\&" + text if text.startswith((".", "'")) else text


if __name__ == "__main__":
    for name, page in pages().items():
        (DIRECTORY / name).write_text(page, encoding="utf-8")
