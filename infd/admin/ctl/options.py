"""Options that several commands share."""

from __future__ import annotations

import re
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    Command = Callable[..., None]

_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def ago_of(text: str) -> timedelta | None:
    """Read a time such as 90s, 5m, 2h or 1d; None: the text is no time."""
    found = re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII)
    if found is None or int(found[1]) * _SECONDS[found[2]] >= 10**10:
        return None
    return timedelta(seconds=int(found[1]) * _SECONDS[found[2]])


class Ago(click.ParamType):  # type: ignore[type-arg]
    """How long ago, as timedelta."""

    name = "time"

    def convert(self, value: str, parameter: click.Parameter | None, context: click.Context | None) -> timedelta:
        if (ago := ago_of(value)) is None:
            self.fail(f"{value!r} is no time such as 90s, 5m, 2h or 1d", parameter, context)
        return ago


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON with a stable schema.")


def patience_options(until: str) -> Callable[[Command], Command]:
    """Add --wait, with the help text `until`, and --timeout to a command, which receives `wait` and `timeout_s`."""

    def decorate(command: Command) -> Command:
        @click.option("--wait", is_flag=True, help=until)
        @click.option(
            "--timeout",
            "timeout_s",
            type=click.FloatRange(min=0, max=1e9),
            metavar="SECONDS",
            help="Wait at most this long.",
        )
        @wraps(command)
        def checked(*arguments: Any, wait: bool, timeout_s: float | None, **options: Any) -> None:
            if timeout_s is not None and not wait:
                raise click.UsageError("--timeout says how long --wait waits; give both")
            command(*arguments, wait=wait, timeout_s=timeout_s, **options)

        return checked

    return decorate
