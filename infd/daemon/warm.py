"""`infd warm`: compile a model's kernels into the cache that `infd start` reads, and report times."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import click

from infd.daemon import components, resolve
from infd.hub.fetch import fetch

if TYPE_CHECKING:
    from pathlib import Path

    from infd.config import Config, Environment
    from infd.kernels.triton.compiled import Entry


def warm(config: Config, environment: Environment, target: str | None, *, tune: bool = False) -> int:
    """Compile kernels for `target`; None: for this machine's GPU. Return the exit code.

    tune  first measure the tile sizes of attention and experts on this machine's GPU, and use the fastest

    Raises StartError.
    """
    settings = components.located(config, environment, _directory(config, environment))
    from infd.runner.start.warming import warm  # imports torch

    started = time.monotonic()
    warmed = warm(settings, target, _report, tune=tune)
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


def _report(entry: Entry) -> None:
    if not entry.found:
        click.echo(f"{entry.kernel:12} {entry.seconds:6.1f} s")


def _directory(config: Config, environment: Environment) -> Path:
    """Return the checkpoint's directory; fetch the model first if it is on a hub."""
    if (directory := resolve.checkpoint(config, environment.models)) is not None:
        return directory
    return fetch(config.model.path, components.hub(config, environment.hub), lambda done, total: None)
