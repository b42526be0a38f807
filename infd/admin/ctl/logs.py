"""`infdctl logs`: the daemon's recent log records, and new records as they are logged."""

from __future__ import annotations

import time
import urllib.parse
from datetime import timedelta
from typing import TYPE_CHECKING, get_args

import click

from infd.admin.ctl import show
from infd.admin.ctl.options import ago_of, json_option
from infd.admin.items import Level, LogRecord

if TYPE_CHECKING:
    from infd.admin.ctl.client import AdminClient


class Since(click.ParamType):  # type: ignore[type-arg]
    """A record's number, as int, or how long ago, as timedelta."""

    name = "since"

    def convert(self, value: str, parameter: click.Parameter | None, context: click.Context | None) -> int | timedelta:
        if (ago := ago_of(value)) is not None:
            return ago
        if value.isdecimal() and int(value) <= 2**62:
            return int(value)
        return self.fail(
            f"{value!r} is neither a record's number nor a time such as 90s, 5m, 2h or 1d", parameter, context
        )


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
    type=Since(),
    metavar="N|TIME",
    help="Begin after record N instead; with all, if the restarted daemon has not reached N. With a unit, as in 90s,"
    " 5m, 2h or 1d, begin that long ago.",
)
@click.option(
    "--level",
    type=click.Choice(get_args(Level)),
    default="debug",
    show_default=True,
    help="Only records of this level and above. The daemon logs none below its log.level.",
)
@click.option(
    "--request",
    metavar="ID",
    default="",
    help="Only records about this request: its X-Request-Id, or its id in `infdctl ps` or `infdctl slow`.",
)
@json_option
@click.pass_obj
def logs(
    client: AdminClient,
    follow: bool,
    last: int,
    since: int | timedelta | None,
    level: str,
    request: str,
    as_json: bool,
) -> None:
    """Show or follow the daemon's recent log, wherever it is written to, as plain text: all, or of one request.

    The daemon keeps about 2,000 records in memory. With --json each record is a line. The daemon disconnects a
    follower that does not read; --since N continues after record N.
    """
    query = {"follow": str(follow).lower(), "last": last, "level": level, "request": request}
    begin = 0.0
    if isinstance(since, timedelta):
        begin, query["since"] = time.time() - since.total_seconds(), 0
    elif since is not None:
        query["since"] = since
    for record in client.read(f"/v1/logs?{urllib.parse.urlencode(query)}", LogRecord):
        if record.time < begin:
            continue
        show.as_line(record) if as_json else show.log_record(record)
