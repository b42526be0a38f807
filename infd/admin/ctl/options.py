"""Options that several commands share."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    Command = Callable[..., None]

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
