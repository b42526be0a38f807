"""The `infd` command line, except serving."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.shell_completion import ShellComplete

from infd.admin.ctl import cli as infdctl
from infd.cli import cli, main
from infd.commandline import Group
from infd.config import SETTINGS
from infd.daemon import check
from infd.kernels.cpu.built import STALE
from infd.version import __version__

pytestmark = pytest.mark.usefixtures("restored_logging")  # a start configures the log before it fails


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version_is_printed(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argument) == 0
    assert capsys.readouterr().out == f"infd {__version__}\n"


def test_flags_are_stronger_than_the_file_and_every_setting_is_reached_by_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[server]\nport = 1\nhost = '::1'\n")

    code = run(
        *("config", "show", "--config", str(file), "--port", "2", "--set", "limits.choices=3", "--no-banner"),
        *("--served-name", "a", "--served-name", "b", "--kv-cache-bytes", "2G"),
    )

    shown = tomllib.loads(capsys.readouterr().out)
    assert code == 0
    assert shown["server"]["port"] == 2
    assert shown["server"]["host"] == ["::1"]
    assert shown["limits"]["choices"] == 3
    assert shown["log"]["banner"] is False
    assert shown["model"]["served_names"] == ["a", "b"]
    assert shown["cache"]["bytes"] == 2**31


def test_a_flag_of_another_server_is_the_same_setting(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--tool-parser", "--tool-call-parser"):
        assert run("config", "show", flag, "kimi_k2") == 0
        assert tomllib.loads(capsys.readouterr().out)["model"]["tool_parser"] == "kimi_k2"


def test_an_unknown_parser_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("embedded", "nobody/fetched-this"):
        assert run("config", "check", "--model", model, "--tool-parser", "no_such") == 78
        assert capsys.readouterr().err.count("'no_such'") == 1


def test_show_prints_a_file_that_can_be_loaded_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("config", "show", "--set", 'model.path=/a "b" \\c')
    first = capsys.readouterr().out
    file = tmp_path / "a.toml"
    file.write_text(first)

    run("config", "show", "--config", str(file))

    assert capsys.readouterr().out == first


def test_origin_names_the_place_of_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    run("config", "show", "--origin", "--port", "2")
    lines = capsys.readouterr().out.splitlines()

    assert any(line.startswith("port = 2 ") and line.endswith("# flag --port") for line in lines)
    assert any(line.startswith('host = ["127.0.0.1"] ') and line.endswith("# built-in") for line in lines)


def test_a_setting_is_described_with_its_values_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "describe", "server.port", "log") == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "server.port = NUMBER\n    TCP port; 0 picks a free one.\n    (default 8000; at a start; --port)\n"
    )
    assert all(f"\n{key} = " in out for key in SETTINGS if key.startswith("log."))
    assert run("config", "describe", "server.prot") == 64
    assert "the nearest is server.port" in capsys.readouterr().err


def test_check_accepts_what_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", "--port", "0") == 0
    assert "is valid" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "99999"], "flag --port: server.port = '99999': expected int <= 65535"),
        (["--set", "server.prot=1"], "flag --set: unknown setting server.prot; the nearest known one is server.port"),
        (["--device", "tpu"], "flag --device: device.kind = 'tpu': expected auto|cpu|cuda|cuda:N|null"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_78(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("config", "check", *arguments) == 78
    captured = capsys.readouterr()
    assert captured.err == f"infd: {says}\n"
    assert captured.out == ""


def test_check_looks_at_every_file_that_the_settings_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% if %}")
    files = ("--api-key-file", "/nope", "--chat-template", str(tmp_path / "broken.jinja"))

    assert run("config", "check", "--model", "/nope", *files) == 78
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("infd: /nope is not a directory; --model takes")
    assert lines[1].startswith(f"infd: chat template {tmp_path}/broken.jinja: the chat template is wrong in line 1")
    assert lines[2] == "infd: server.api_key_file: /nope cannot be read: No such file or directory"
    for name in ("live.crt", "live.key"):
        (tmp_path / name).write_text("none")
    tls = ("--set", f"server.tls_certificate={tmp_path}/live.crt", "--set", f"server.tls_key={tmp_path}/live.key")
    assert run("config", "check", *tls) == 78
    assert capsys.readouterr().err.startswith("infd: server.tls_certificate, server.tls_key: ")
    assert run("config", "check", "--set", "server.trusted_proxies=nobody") == 78
    assert "server.trusted_proxies" in capsys.readouterr().err
    assert run("config", "check", "--model", str(tmp_path)) == 78
    assert capsys.readouterr().err == f"infd: {tmp_path}/config.json: No such file or directory\n"


@pytest.mark.parametrize(("device", "warned"), [("cpu", True), ("null", False)])
def test_check_warns_of_missing_native_kernels_where_a_cpu_would_compute(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, device: str, warned: bool
) -> None:
    monkeypatch.setattr(check, "why_not_built", lambda: STALE)
    assert run("config", "check", "--device", device) == 0
    line = f"warning: without native kernels answers take many times as long: {STALE}"
    assert (capsys.readouterr().out.splitlines()[-1] == line) == warned


def test_check_fetches_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "check", "--model", "org/name") == 0


@pytest.mark.parametrize(
    "arguments", [[], ["config"], ["nonsense"], ["start", "--nonsense"], ["start", "--port"], ["start", "--set", "a"]]
)
def test_a_bad_command_line_is_one_line_and_exit_64(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 64
    error = capsys.readouterr().err
    assert error.startswith("infd: ")
    assert error.count("\n") == 1


def test_without_a_gpu_and_a_target_warm_names_the_missing_option(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    missing = "name the one to compile for" if find_spec("triton") else "triton is not installed"
    assert run("warm") == 69
    assert missing in capsys.readouterr().err


def test_output_that_cannot_be_written_is_one_line_and_exit_74() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "infd", "config", "show"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )

    assert (done.returncode, done.stderr) == (74, "infd: standard output: No space left on device\n")


def test_the_model_is_an_argument_of_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("start", "/nowhere/model") == 78
    assert "/nowhere/model" in capfd.readouterr().err
    assert run("start", "/nowhere/model", "--model", "/nowhere/else") == 64


@pytest.mark.parametrize("program", ["infd", "infdctl"])
def test_a_shell_completes_commands(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("completion", "bash") == 0
    script = capsys.readouterr().out
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    typed = f"""{script}
COMP_WORDS=({program} ver) COMP_CWORD=1
_{program}_completion {program}
echo "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", typed], env={"PATH": path}, capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["version"]


@pytest.mark.parametrize(
    ("program", "typed", "completed"),
    [
        ("infd", ["start", "--log-level", ""], "debug info warning error"),
        ("infd", ["start", "--device", "c"], "cpu cuda"),
        ("infd", ["start", "--set", "log.le"], "log.level=debug log.level=info log.level=warning log.level=error"),
        ("infd", ["start", "--set", "log.level=w"], "log.level=warning"),
        ("infd", ["config", "describe", "metr"], "metrics metrics.public metrics.compat"),
        ("infdctl", ["config", "get", "log."], "log.level log.format log.access log.slow_s log.banner"),
        ("infdctl", ["config", "set", "log."], "log.level= log.access= log.slow_s="),
        ("infdctl", ["config", "set", "log.access="], "log.access=true log.access=false"),
        ("infdctl", ["config", "set", "log.level", "=", "w"], "warning"),
        ("infdctl", ["config", "set", "log.level", "="], "debug info warning error"),
        ("infdctl", ["slow", "--by", "t"], "total ttft"),
        ("infdctl", ["wait", "r"], "ready"),
        ("infdctl", ["bench", "--dataset", "s"], "shared-prefix sharegpt"),
        ("infdctl", ["bench", "--endpoint", "chat"], "chat"),
    ],
)
def test_a_shell_completes_values_that_can_be_listed(program: str, typed: list[str], completed: str) -> None:
    command = {"infd": cli, "infdctl": infdctl}[program]
    completer = ShellComplete(command, {}, program, "")

    assert " ".join(item.value for item in completer.get_completions(typed[:-1], typed[-1])) == completed


def test_help_is_not_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("start", "--help") == 0
    assert "--kv-cache-bytes, --kv-cache-memory-bytes SIZE" in capsys.readouterr().out


# Modules that vet a tokenizer take a few milliseconds to import.
HEAVY = ("torch", "transformers", "aiohttp", "rich")


@pytest.mark.parametrize(
    ("arguments", "heavy"), [(["version"], (*HEAVY, "tokenizers")), (["config", "check"], HEAVY), (["models"], HEAVY)]
)
def test_small_commands_import_nothing_heavy(arguments: list[str], heavy: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom infd.cli import main\n"
        f"try: main({arguments})\nexcept SystemExit: pass\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


def test_a_daemon_is_imported_without_the_libraries_of_the_device() -> None:
    heavy = ("torch", "numpy", "transformers", "llguidance", "rich")
    code = f"import sys, infd.daemon.daemon\nprint([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "says"), [("serve", "`infd start MODEL`"), ("top", "`infdctl`"), ("ls", "`infd models`")]
)
def test_a_command_of_another_program_is_answered_with_ours(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name) == 64
    assert says in capsys.readouterr().err


def test_commands_that_answers_name_exist_and_those_they_replace_do_not() -> None:
    from infd.admin.ctl.app import cli as infdctl
    from infd.cli import cli as infd

    for group in (infd, infdctl):
        assert isinstance(group, Group)
        assert not group.commands.keys() & group.instead.keys()
        for told in group.instead.values():
            for program, command in re.findall(r"`(infd|infdctl) ([a-z][a-z-]*)", told):
                assert command in {"infd": infd, "infdctl": infdctl}[program].commands


def test_help_lists_commands_with_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    commands = capsys.readouterr().out.partition("Commands:")[2]
    assert "..." not in commands
    assert "Fetch a model ahead of `infd start`, and print its path." in commands
