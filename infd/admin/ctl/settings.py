"""`infdctl reload | config get | config set`: settings of the running daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from msgspec import UNSET

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.client import Refused
from infd.admin.ctl.options import json_option
from infd.commandline import Group, assignments, setting_names

if TYPE_CHECKING:
    from infd.admin.ctl.client import AdminClient


@click.command()
@json_option
@click.pass_obj
def reload(client: AdminClient, as_json: bool) -> None:
    """Read settings and API keys again, as on HUP, and change those that may change while infd runs.

    The configuration is checked whole first; if it is invalid, nothing changes and the exit code is 1. Settings that
    take effect at the next start only are listed. Values of `infdctl config set` are replaced.
    """
    try:
        done = client.post("/v1/reload", protocol.Reloaded, patient=True)
    except Refused as refusal:
        raise Refused(f"not reloaded, nothing changed: {refusal}") from None
    if as_json:
        show.as_json(done)
        return
    certificate = ", certificate read again" if done.certificate else ""
    click.echo(f"reloaded: {len(done.applied)} settings changed{certificate}", err=True)
    changes = {"added": done.keys_added, "removed": done.keys_removed, "changed": done.keys_changed}
    listed = ", ".join(f"{number} {change}" for change, number in changes.items() if number)
    if done.keys or listed:
        click.echo(f"API keys: {done.keys} ({listed or 'none changed'})", err=True)
    _show_changes(done)


@click.group(cls=Group, no_args_is_help=False)
def config() -> None:
    """Show or change the settings of the running daemon, such as log.level."""


@config.command("get")
@click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=setting_names)
@json_option
@click.pass_obj
def get(client: AdminClient, keys: tuple[str, ...], as_json: bool) -> None:
    """Show the settings in force: all, or those named SECTION.KEY, or all of a SECTION."""
    rows = client.get("/v1/config", protocol.Settings).settings
    for key in keys:
        if not any(_selects(key, row.key) for row in rows):
            raise click.UsageError(f"the daemon has no setting {key!r}; `infdctl config get` lists all")
    rows = [row for row in rows if not keys or any(_selects(key, row.key) for key in keys)]
    if as_json:
        show.as_json(protocol.Settings(rows))
        return
    show.table(
        ("SETTING", "VALUE", "CHANGES", "FROM"),
        ((row.key, show.value(row.value), _change(row), row.origin) for row in rows),
    )


def _change(row: protocol.SettingRow) -> str:
    """Return when the setting may change, with the value that waits for the next start."""
    if row.restart is not UNSET:
        return f"to {show.value(row.restart)} at the next start"
    return "live" if row.live else "at a start"


@config.command("set")
@click.argument("assigned", metavar="KEY=VALUE...", nargs=-1, required=True, shell_complete=assignments(live=True))
@json_option
@click.pass_obj
def set_(client: AdminClient, assigned: tuple[str, ...], as_json: bool) -> None:
    """Change settings until the next reload or start, all or none. Values are written as after `infd start --set`.

    For example: infdctl config set log.level=debug. `infd config describe` says which settings are live. Files of API
    keys and certificates are read again too. A number without a value is `null`, and an empty table `{}`.
    """
    values = {}
    for assignment in assigned:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise click.UsageError(f"{assignment}: expected SECTION.KEY=VALUE")
        if key.strip() in values:
            raise click.UsageError(f"{key.strip()} is given twice; separate the items of a list or table by commas")
        values[key.strip()] = value
    done = client.post("/v1/config/set", protocol.Reloaded, {"values": values}, patient=True)
    if as_json:
        show.as_json(done)
        return
    _show_changes(done)


def _show_changes(done: protocol.Reloaded) -> None:
    undone = set(done.undone)
    for change in done.applied:
        note = "  (replaces a value of `infdctl config set`)" if change.key in undone else ""
        click.echo(f"{change.key}: {show.value(change.old)} -> {show.value(change.new)}{note}")
    for change in done.restart:
        click.echo(f"{change.key}: {show.value(change.old)} -> {show.value(change.new)}  (at the next start)")
    for doubt in done.doubts:
        click.echo(f"infdctl: {doubt}", err=True)
    if not done.keys and any(change.key == "server.api_key_file" for change in done.applied):
        click.echo("infdctl: no API key is left: requests are served without a key now", err=True)


def _selects(key: str, name: str) -> bool:
    return name == key or name.startswith(f"{key}.")
