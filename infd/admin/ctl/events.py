"""`infdctl events`: the daemon's recent events, and new events as they happen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.options import json_option

if TYPE_CHECKING:
    from infd.admin.ctl.client import AdminClient


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Continue with new events until the daemon exits.")
@click.option(
    "--since",
    type=click.IntRange(min=0, max=2**62),
    default=0,
    metavar="N",
    help="Only events after event N; all, if the restarted daemon has not reached N.",
)
@json_option
@click.pass_obj
def events(client: AdminClient, follow: bool, since: int, as_json: bool) -> None:
    """Show recent events: states, admin verbs and their results, adapters, failed steps.

    The daemon stores about 1,000 events. With --json each event is a line. The daemon disconnects a follower that does
    not read; --since N continues after event N.
    """
    for event in client.read(f"/v1/events?since={since}&follow={str(follow).lower()}", protocol.Event):
        show.as_line(event) if as_json else show.event(event)
