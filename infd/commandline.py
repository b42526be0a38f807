"""Parts that the command lines of `infd` and `infdctl` share: help, errors, and completion in shells."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from infd.config import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SHELLS = ("bash", "zsh", "fish")


class Group(click.Group):
    """A group whose help has the first sentence of each command whole; click cuts it off.

    instead  the answers to commands that only other programs have, by the command's name
    """

    group_class = type

    def __init__(self, *arguments: Any, instead: Mapping[str, str] | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.instead = instead or {}

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and (told := self.instead.get(args[0])) is not None:
            raise click.UsageError(f"No such command {args[0]!r}: {told}.", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:  # click's parser and callbacks do not say of which command
            if error.ctx is None and (name := ctx.invoked_subcommand) is not None:
                command = self.get_command(ctx, name)
                error.ctx = None if command is None else click.Context(command, ctx, name)
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, command.get_short_help_str(limit=1000)) for name, command in commands if command is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add curl's options for TLS to a client, which gets an ssl.SSLContext as `tls`; None: the libraries' defaults."""

    @functools.wraps(command)
    def connecting(
        *arguments: Any, cacert: str | None, cert: str | None, key: str | None, insecure: bool, **options: Any
    ) -> Any:
        from infd.sockets.tls import client_context

        try:
            tls = client_context(authority=cacert, certificate=cert, key=key, insecure=insecure)
        except ValueError as error:
            raise click.UsageError(str(error), click.get_current_context()) from None
        return command(*arguments, tls=tls, **options)

    for option in (
        click.option("--insecure", is_flag=True, help="Accept any TLS certificate."),
        click.option("--key", metavar="FILE", help="Key of --cert, in PEM.  [in the file of --cert]"),
        click.option("--cert", metavar="FILE", help="Certificate to show to a server that asks for one, in PEM."),
        click.option("--cacert", metavar="FILE", help="Authorities to trust in place of the system's, in PEM."),
    ):
        connecting = option(connecting)
    return connecting


def setting_names(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete a setting's name, or that of a section."""
    sections = dict.fromkeys(key.partition(".")[0] for key in SETTINGS)
    return [name for name in (*sections, *SETTINGS) if name.startswith(incomplete)]


def assignments(*, live: bool) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Return a completer of SECTION.KEY=VALUE: of names, and of values that can be listed.

    live  only settings that change while infd runs
    """

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        keys = [key for key, setting in SETTINGS.items() if setting.live or not live]
        # bash passes `log.level=de` as three words; click leaves out an `=` that is the last.
        words = [word for word in context.params.get(parameter.name or "") or () if word != "="]
        if words and words[-1] in keys:
            return _listed(words[-1], incomplete)
        key, given, value = incomplete.partition("=")
        if given:
            return [f"{key}={each}" for each in _listed(key, value)]
        near = [key for key in keys if key.startswith(incomplete)]
        (only,) = near if len(near) == 1 else ("",)
        return [f"{only}={each}" for each in _listed(only, "")] or [f"{key}=" for key in near]

    return complete


def _listed(key: str, incomplete: str) -> list[str]:
    """Return the values of a setting that can be listed and begin so."""
    choices = SETTINGS[key].choices if key in SETTINGS else ()
    return [choice for choice in choices if choice.startswith(incomplete)]


def completion(command: click.Command, program: str, shell: str) -> str:
    """Return the script that makes `shell` complete the program's arguments; the shell evaluates it."""
    from click.shell_completion import get_completion_class

    variable = f"_{program.upper()}_COMPLETE"
    kind = get_completion_class(shell)
    assert kind is not None, shell
    completer = kind(command, {}, program, variable)
    return completer.source_template % completer.source_vars()  # source() would run the shell to check its version


def misused(error: click.UsageError, program: str) -> str:
    """Return a usage error in two sentences: the error, and the command that shows the usage."""
    command = error.ctx.command_path if error.ctx is not None else program
    message = re.sub(r"\?(\)?)$", r"\1", error.format_message().removesuffix("."))
    return f"{message}. See `{command} --help`."


def unwritable(error: OSError) -> str:
    """Return an error of reading or writing, and discard further output: it could fail again while Python exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.__stdout__.fileno() if sys.__stdout__ is not None else 1)
    os.close(devnull)
    return f"{error.filename or 'standard output'}: {error.strerror or error}"
