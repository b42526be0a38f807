"""What infd says of vLLM's flags is what its command lines do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import msgspec
import pytest
from click.testing import CliRunner

from infd.admin.ctl import cli as infdctl
from infd.cli import cli, main
from infd.config import SETTINGS
from infd.config.vllm import Flags, flags
from infd.http.apis.chat import CHAT
from infd.http.apis.completions import COMPLETIONS
from infd.http.schema.unsupported import ABSENT

if TYPE_CHECKING:
    import click

COMMANDS: dict[Literal["serve", "bench"], tuple[click.Command, int]] = {
    "serve": (cli.commands["start"], 321),  # flags of vLLM 0.33.0
    "bench": (infdctl.commands["bench"], 101),
}


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


def refused(known: Flags) -> list[str]:
    return [flag for some in known.refused for flag in some.flags]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_listed_once(name: Literal["serve", "bench"]) -> None:
    known = flags(name)
    listed = [*known.taken, *known.aliases, *known.ours, *refused(known)]

    assert len(set(listed)) == len(listed) == COMMANDS[name][1]
    assert set(known.short.values()) <= set(listed)
    assert not set(known.short) & options(COMMANDS[name][0])


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_that_are_taken_exist_and_refused_ones_do_not(name: Literal["serve", "bench"]) -> None:
    known, ours = flags(name), options(COMMANDS[name][0])

    assert set(known.taken) | set(known.aliases.values()) <= ours
    assert not ours & set(known.aliases)
    assert not ours & set(refused(known))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_named_replacements_of_flags_exist(name: Literal["serve", "bench"]) -> None:
    known = flags(name)
    for text in [*known.ours.values(), *(some.reason for some in known.refused)]:
        rest = re.sub(r"infd warm --tune", "", text)
        assert set(re.findall(r"--[a-z][a-z-]*", rest)) <= options(COMMANDS[name][0]), text
        keys = re.findall(r"--set (\S+?)=", text)
        assert all(key in SETTINGS for key in keys), text
        for program, command in re.findall(r"\b(infdctl|infd) (warm|models|start|ops|reload|sleep|bench)\b", text):
            assert command in (infdctl if program == "infdctl" else cli).commands


def test_fields_of_requests_replace_flags() -> None:
    fields = {
        field.encode_name
        for api in (CHAT, COMPLETIONS)
        for field in msgspec.structs.fields(api.decoder.type)
        if field.default is not ABSENT
    }
    known = flags("serve")

    named = [field for text in known.ours.values() for field in re.findall(r"the request's (?:field )?(\w+)", text)]
    assert set(named) <= fields
    assert not fields & {flag.removeprefix("--").removeprefix("enable-").replace("-", "_") for flag in refused(known)}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpu-memory-utilization", "0.5"], "in infd: --set device.memory_utilization=FRACTION"),
        (["--gpu_memory_utilization=0.5"], "in infd: --set device.memory_utilization=FRACTION"),
        (["--no-enable-prefix-caching"], "in infd: --set cache.prefix_caching=true"),
        (["m", "--tensor-parallel-size", "2"], "and infd lacks it: infd computes on one device"),
        (["-tp", "2"], "-tp is vLLM's, and infd lacks it: infd computes on one device"),
        (["m", "-dp=2"], "-dp is vLLM's, and infd lacks it: infd computes on one device"),
        (["-q", "fp8"], "-q is vLLM's; in infd: --quantization"),
    ],
)
def test_a_flag_of_vllm_is_answered_with_infds(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["start", *arguments])

    error = capsys.readouterr().err
    assert left.value.code == 64
    assert told in error
    assert error.endswith("See `infd start --help`.\n")
    assert error.count("\n") == 1


def test_other_commands_and_flags_say_that_there_is_no_such_option(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["chat", "--tensor-parallel-size"], ["start", "--nonsense"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "No such option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--backend", "openai-embeddings"], "--task embed (openai-embeddings, vllm-pooling) or rerank (vllm-rerank)"),
        (["--no-reranker"], "--task embed: an embedding model is measured by its embeddings"),
        (["--dataset-name", "random-rerank"], "--task rerank measures random queries, each with --inputs documents"),
        (["--endpoint", "/v1/rerank"], "requests to /v1/rerank are measured by --task rerank"),
        (["--random-batch-size", "0"], "0 is not in the range 1<=x<=2048"),
    ],
)
def test_a_flag_of_vllm_for_pooling_models_is_answered_with_infds(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(infdctl, ["bench", *arguments])

    assert done.exit_code
    assert told in f"{done.output}{done.exception}".replace("\n", " ")
