"""`infdctl events`: what has happened to the daemon, and what happens to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.options import json_option

if TYPE_CHECKING:
    from infd.admin.ctl.client import AdminClient


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Go on with what happens from now on, until the daemon ends.")
@click.option(
    "--since",
    type=click.IntRange(min=0, max=2**62),
    default=0,
    metavar="N",
    help="Only what came after event N; all, if the daemon has started anew and is not there yet.",
)
@json_option
@click.pass_obj
def events(client: AdminClient, follow: bool, since: int, as_json: bool) -> None:
    """Show what happened lately: states, who asked for what and what came of it, adapters, failed steps.

    The daemon keeps the latest thousand or so. With --json each is a line of its own. Who follows and does not read is
    dropped in the end; --since the last number goes on from there.
    """
    for event in client.read(f"/v1/events?since={since}&follow={str(follow).lower()}", protocol.Event):
        show.as_line(event) if as_json else show.event(event)
