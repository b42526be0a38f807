"""Install systemd's units, users and directories for this installation of infd."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from infd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

UNITS: Final = Path(__file__).parent / "units"
# Where each file of UNITS is installed.
TARGETS: Final = {
    "infd.service": "etc/systemd/system/infd.service",
    "infd.socket": "etc/systemd/system/infd.socket",
    "infd@.service": "etc/systemd/system/infd@.service",
    "infd@.socket": "etc/systemd/system/infd@.socket",
    "infd.sysusers": "etc/sysusers.d/infd.conf",
    "infd.tmpfiles": "etc/tmpfiles.d/infd.conf",
}
COMMANDS: Final = ("infd", "infdctl")
WRITTEN_FOR: Final = "/opt/infd/bin/"  # the commands' directory in the units
HIDDEN: Final = ("/home", "/root", "/run/user")  # by ProtectHome
_CANNOT_START: Final = (
    "is in a directory that the units hide (ProtectHome), so infd could not start: install infd with a python of the"
    " system, for example in /opt/infd, and run that one's `infd install-unit`"
)
NEXT: Final = """\
Now, as root:
  systemd-sysusers && systemd-tmpfiles --create infd.conf && systemctl daemon-reload
  systemctl enable --now infd
or, to start at the first connection and to end when idle (server.idle_exit_s), systemctl enable --now infd.socket
Settings go into /etc/infd/infd.toml; `systemctl enable --now infd@NAME` serves /etc/infd/NAME.toml."""


def install(root: Path, commands: Path, python: Path) -> list[Path]:
    """Write all files beneath `root`, and link commands and man pages into its usr/local; return the paths.

    commands  directory of this installation's commands
    python    the interpreter that they run, links resolved

    Raises ConfigError for an installation that the units could not start, and for a file that cannot be written.
    """
    require_visible(commands, python)
    written = []
    try:
        for name, text in files(commands):
            path = root / TARGETS[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            written.append(path)
        links = {root / "usr/local/bin" / command: commands / command for command in COMMANDS}
        pages = commands.parent / "share/man"
        links |= {root / "usr/local/share/man" / page.relative_to(pages): page for page in pages.glob("man?/infd*")}
        for link, target in links.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            if link == target:
                continue
            if link.exists() and not link.is_symlink():
                raise ConfigError(f"{link} exists and is not a link; move it away")
            link.unlink(missing_ok=True)
            link.symlink_to(target)
            written.append(link)
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; run infd install-unit as root") from error
    return written


def files(commands: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file, with the commands' directory of this installation."""
    for name in TARGETS:
        text = (UNITS / name).read_text(encoding="utf-8")
        yield (
            name,
            "".join(
                line if line.startswith("#") else line.replace(WRITTEN_FOR, f"{commands}/")
                for line in text.splitlines(keepends=True)
            ),
        )


def require_visible(commands: Path, python: Path) -> None:
    """Raise ConfigError if the units hide the commands or their python: ProtectHome hides /home and /root."""
    if (hidden := hidden_path(commands, python)) is not None:
        raise ConfigError(f"{hidden} {_CANNOT_START}")


def hidden_path(commands: Path, python: Path) -> Path | None:
    """Return the first path, of the commands or their python, that the units hide; None: they hide neither."""
    for path in (commands / "infd", python):
        if any(path.is_relative_to(hidden) for hidden in HIDDEN):
            return path
    return None


def run(root: Path, *, show: bool) -> int:
    """Install, or with `show` print all files, and return the exit code. Raises ConfigError."""
    commands, python = Path(sys.prefix) / "bin", Path(sys.executable).resolve()
    if show:
        for name, text in files(commands):
            click.echo(f"# {root / TARGETS[name]}\n{text}")
        if (hidden := hidden_path(commands, python)) is not None:
            click.echo(f"infd: these units would fail: {hidden} {_CANNOT_START}", err=True)
        return os.EX_OK
    for path in install(root, commands, python):
        click.echo(str(path))
    click.echo(NEXT, err=True)
    return os.EX_OK
