"""The facts about infd that the embedded model learns agree with the code."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import msgspec
import pytest

import infd
from infd import errors
from infd.admin.commands import VERBS
from infd.admin.ctl.app import cli as infdctl
from infd.cli import cli as infd_cli
from infd.config import SETTINGS
from infd.embedded.recipe import facts
from infd.engine.lifecycle.state import State

pytestmark = pytest.mark.exhaustive

ROOT = Path(infd.__file__).parent.parent

# Features that facts state and the code does not have yet; remove an entry with its feature.
AWAITED: set[str] = set()
CHECKS = sorted({check for fact in facts.FACTS for check in fact.check})


@pytest.fixture(scope="module")
def routes() -> set[tuple[str, str]]:
    from infd.http.app import routes

    return set(routes())


def holds(check: str, routes: set[tuple[str, str]]) -> bool:
    kind, _, rest = check.partition(" ")
    first, _, last = rest.partition(" ")
    if kind == "setting":
        default = SETTINGS[first].default if first in SETTINGS else ...
        return json.loads(msgspec.json.encode(default)) == _value(last) if default is not ... else False
    if kind == "key":
        return any(key.endswith(f".{first}") for key in SETTINGS)
    if kind == "cli":
        return on_the_command_line(rest.split())
    if kind == "absent":
        return not on_the_command_line(rest.split())
    if kind == "route":
        return (first, last) in routes
    if kind == "verb":
        return first in {verb.name for verb in VERBS}
    if kind == "state":
        return first in {state.value for state in State}
    if kind == "error":
        return getattr(errors, first).status == int(last)
    if kind == "exit":
        return getattr(errors, first).exit_code == int(last)
    assert kind == "file", check
    return last in (ROOT / first).read_text()


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def on_the_command_line(words: list[str]) -> bool:
    """Return whether click knows a command line: program, commands, an option, one of its choices."""
    command: click.Command = {"infd": infd_cli, "infdctl": infdctl}[words[0]]
    for place, word in enumerate(words[1:], 1):
        if word.startswith("--"):
            option = next((option for option in command.params if word in option.opts), None)
            return option is not None and all(choice in choices(option) for choice in words[place + 1 :])
        if not isinstance(command, click.Group) or word not in command.commands:
            return False
        command = command.commands[word]
    return True


def choices(option: click.Parameter) -> list[str]:
    if isinstance(option.type, click.Choice):
        return [str(choice) for choice in option.type.choices]
    if isinstance(option.type, click.IntRange):
        assert option.type.min is not None
        assert option.type.max is not None
        return [str(number) for number in range(option.type.min, option.type.max + 1)]
    metavar = option.metavar or ""
    return metavar.split("|")


@pytest.mark.parametrize("check", [check for check in CHECKS if check not in AWAITED])
def test_a_fact_agrees_with_the_code(check: str, routes: set[tuple[str, str]]):
    assert holds(check, routes)


@pytest.mark.parametrize("check", sorted(AWAITED))
def test_facts_of_planned_features_are_not_yet_true(check: str, routes: set[tuple[str, str]]):
    assert check in CHECKS
    assert not holds(check, routes), f"{check!r} is there: take it off AWAITED"


def test_a_check_can_fail(routes: set[tuple[str, str]]):
    for check in (
        "setting server.port 8001",
        "setting server.ports 8000",
        "key nothing",
        "cli infd begin",
        "cli infd start --colour",
        "cli infd start --hub nowhere",
        "absent infdctl status",
        "route GET /v1/nothing",
        "verb dance",
        "state confused",
        "error Overloaded 430",
        "exit ConfigError 79",
        "file LICENSE GNU",
    ):
        assert not holds(check, routes), check


def test_every_fact_is_checked_and_asked_for_in_many_ways():
    for fact in facts.FACTS:
        assert fact.check, fact.id
        assert len(set(map(facts.fold, fact.questions))) >= 14, fact.id
    assert len({fact.id for fact in facts.FACTS}) == len(facts.FACTS)


def test_exit_codes_are_those_of_sysexits():
    assert (os.EX_USAGE, os.EX_UNAVAILABLE, os.EX_SOFTWARE, os.EX_OSERR) == (64, 69, 70, 71)
    assert (os.EX_IOERR, os.EX_TEMPFAIL, os.EX_CONFIG) == (74, 75, 78)
