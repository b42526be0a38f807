"""`infdctl loras | load-lora | unload-lora`: LoRA adapters, served under their own model names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from infd.admin import protocol
from infd.admin.ctl import show
from infd.admin.ctl.client import TimedOut
from infd.admin.ctl.options import json_option, patience_options

if TYPE_CHECKING:
    from infd.admin.ctl.client import AdminClient


@click.command()
@json_option
@click.pass_obj
def loras(client: AdminClient, as_json: bool) -> None:
    """List the adapters, with the number of requests that use each adapter."""
    answer = client.get("/v1/loras", protocol.Loras)
    show.as_json(answer) if as_json else show.loras(answer)


@click.command()
@click.argument("name")
@click.argument("path")
@click.option("--in-place", is_flag=True, help="Replace the adapter now loaded as NAME.")
@patience_options("Return once no request uses the replaced adapter.")
@json_option
@click.pass_obj
def load_lora(
    client: AdminClient, name: str, path: str, in_place: bool, wait: bool, timeout_s: float | None, as_json: bool
) -> None:
    """Load the LoRA adapter in directory PATH, beneath lora.root, and serve it as the model NAME.

    infd reads and checks the whole adapter before requests can name it. With --in-place, running requests keep the
    replaced adapter.
    """
    arguments = {"name": name, "path": path, "in_place": in_place, "wait_s": timeout_s if wait else 0.0}
    now = client.post("/v1/loras/load", protocol.LoraChanged, arguments, patient=True)
    if now.changed:
        click.echo(f"{name} is loaded: rank {now.rank}, {now.bytes / 2**20:.1f} MiB, {now.took_s:.1f} s", err=True)
    else:
        click.echo(f"{name} stands for {path} already; --in-place reads it again", err=True)
    _finish(now, "replaced", wait=wait, timeout_s=timeout_s, as_json=as_json)


@click.command()
@click.argument("name")
@patience_options("Return once no request uses the adapter and its memory is freed.")
@json_option
@click.pass_obj
def unload_lora(client: AdminClient, name: str, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Stop serving adapter NAME. infd frees the adapter's memory after the last request that uses the adapter."""
    arguments = {"name": name, "wait_s": timeout_s if wait else 0.0}
    now = client.post("/v1/loras/unload", protocol.LoraChanged, arguments, patient=True)
    click.echo(f"{name} is unloaded" if now.changed else f"nothing is loaded as {name}", err=True)
    _finish(now, "unloaded", wait=wait, timeout_s=timeout_s, as_json=as_json)


def _finish(now: protocol.LoraChanged, change: str, *, wait: bool, timeout_s: float | None, as_json: bool) -> None:
    """Report how many choices still use the replaced or unloaded adapter; with `wait`, raise TimedOut if any.

    change  "replaced" or "unloaded"
    """
    if not now.done:
        users = f"{now.requests} choices still use the adapter {change}; it is freed with the last of them"
        if wait:
            raise TimedOut(f"{users}, which took longer than {timeout_s:g} s: wait again, see `infdctl loras`")
        click.echo(users, err=True)
    if as_json:
        show.as_json(now)
