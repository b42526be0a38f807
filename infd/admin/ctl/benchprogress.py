"""The progress of `infdctl bench`, on standard error: a bar on a terminal, messages elsewhere."""

from __future__ import annotations

import sys
from typing import Self

import click

_LABELS = {"prompts": "writing prompts", "requests": "requests"}


class Progress:
    """An observer of the load generator (`Observer` in `loadgen/load.py`).

    loads  number of measurements
    bar    whether a terminal gets a bar
    """

    def __init__(self, loads: int, *, bar: bool) -> None:
        self._loads = loads
        self._number = 0
        self._bar = None
        if bar and sys.stderr.isatty():
            from rich.console import Console  # imported here: it takes longer than most commands
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            console = Console(stderr=True, highlight=False)
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=None, visible=False)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self) -> None:
        """The next measurement begins."""
        self._number += 1

    def tell(self, text: str) -> None:
        """Write a message, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        else:
            click.echo(text, err=True)

    def advance(self, stage: str, done: int, total: int) -> None:
        """Move the bar."""
        if self._bar is None:
            return
        part = f"{self._number}/{self._loads} " if self._loads > 1 else ""
        self._bar.update(
            self._task, description=f"{part}{_LABELS[stage]}", completed=done, total=total, visible=done < total
        )
