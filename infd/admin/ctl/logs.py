"""`infdctl logs`: the daemon's recent log records, and new records as they are logged."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING, get_args

import click

from infd.admin.ctl import show
from infd.admin.ctl.options import json_option
from infd.admin.items import Level, LogRecord

if TYPE_CHECKING:
    from infd.admin.ctl.client import AdminClient


@click.command()
@click.option("--follow", "-f", is_flag=True, help="Continue with new records until the daemon exits.")
@click.option(
    "--lines",
    "-n",
    "last",
    type=click.IntRange(min=0, max=2**62),
    default=100,
    show_default=True,
    metavar="N",
    help="Begin with the last N records.",
)
@click.option(
    "--since",
    type=click.IntRange(min=0, max=2**62),
    metavar="N",
    help="Begin after record N instead; with all, if the restarted daemon has not reached N.",
)
@click.option(
    "--level",
    type=click.Choice(get_args(Level)),
    default="debug",
    show_default=True,
    help="Only records of this level and above. The daemon logs none below its log.level.",
)
@json_option
@click.pass_obj
def logs(client: AdminClient, follow: bool, last: int, since: int | None, level: str, as_json: bool) -> None:
    """Show the daemon's recent log, wherever it is written to, as plain text.

    The daemon keeps about 2,000 records in memory. With --json each record is a line. The daemon disconnects a
    follower that does not read; --since N continues after record N.
    """
    query = {"follow": str(follow).lower(), "last": last, "level": level}
    if since is not None:
        query["since"] = since
    for record in client.read(f"/v1/logs?{urllib.parse.urlencode(query)}", LogRecord):
        show.as_line(record) if as_json else show.log_record(record)
