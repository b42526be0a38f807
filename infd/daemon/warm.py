"""`infd warm`: have the model's kernels compiled where `infd start` will look for them, and say what that took."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from infd.daemon import given, parts
from infd.hub.fetch import fetch

if TYPE_CHECKING:
    from pathlib import Path

    from infd.config import Config, Environment
    from infd.kernels.triton.compiled import Entry


def warm(config: Config, environment: Environment, target: str | None, *, tune: bool = False) -> int:
    """Compile for `target`, or for the GPU here, which is measured first if it is to `tune`. Return the exit code.

    Raises StartError.
    """
    settings = parts.located(config, environment, _directory(config, environment))
    from infd.runner.warming import warm  # torch comes with it

    started = time.monotonic()
    warmed = warm(settings, target, _tell, tune=tune)
    seconds = time.monotonic() - started
    for shape, found in warmed.tuned.items():
        click.echo(
            f"{shape}: decoding takes {found.few:.0%} of the usual time, prompts {found.many:.0%}: {found.tiling}"
        )
    made = sum(not entry.found for entry in warmed.entries)
    where = settings.device.kernel_cache or "the compiler's own directory"
    click.echo(
        f"{len(warmed.entries)} kernels for {warmed.gpu} in {where}: {made} compiled,"
        f" {len(warmed.entries) - made} were there; {seconds:.1f} s in all"
    )
    return os.EX_OK


def _tell(entry: Entry) -> None:
    if not entry.found:
        click.echo(f"{entry.kernel:12} {entry.seconds:6.1f} s")


def _directory(config: Config, environment: Environment) -> Path:
    """Return where the model is, fetching it where that is needed."""
    if (directory := given.checkpoint(config)) is not None:
        return directory
    return fetch(config.model.path, parts.hub(config, environment.hub), lambda done, total: None)
