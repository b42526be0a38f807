"""A daemon with a model from a hub listens while fetching, and starts offline the next time."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.hub.conftest import hub

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.e2e.process import Daemon
    from tests.hub.stand_in import StandIn

__all__ = ["hub"]


@pytest.fixture
def start(start_daemon: Callable[..., Daemon], hub: StandIn, tmp_path: Path) -> Callable[..., Daemon]:
    def start(*arguments: str, **variables: str) -> Daemon:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **variables}
        return start_daemon("--model", "org/tiny", *arguments, **variables)

    return start


def test_it_answers_health_checks_while_it_fetches(start: Callable[..., Daemon], hub: StandIn, tmp_path: Path) -> None:
    hub.held.clear()
    daemon = start()
    daemon.wait_for("STATUS", "starting · fetching org/tiny")
    hub.waiting.wait(60)

    assert daemon.get("/livez")[0] == 200
    status, body = daemon.get("/readyz?verbose")
    assert (status, json.loads(body)["state"]) == (503, "starting")
    assert json.loads(body)["reason"] == "fetching org/tiny"
    hub.held.set()
    daemon.ready()

    assert json.loads(daemon.get("/v1/models")[1])["data"][0]["id"] == "org/tiny"
    assert daemon.log("fetched")["directory"].startswith(str(tmp_path / "home"))

    hub.asked.clear()
    again = start(HF_HUB_OFFLINE="1").ready()
    assert hub.asked == []
    assert json.loads(again.get("/v1/models/org/tiny")[1])["id"] == "org/tiny"


def test_term_while_it_fetches_is_a_clean_exit(start: Callable[..., Daemon], hub: StandIn) -> None:
    hub.held.clear()
    daemon = start()
    daemon.wait_for("STATUS", "starting · fetching org/tiny")
    hub.waiting.wait(60)
    daemon.signal(signal.SIGTERM)

    assert daemon.exit_code() == 0


@pytest.mark.parametrize(
    ("arguments", "variables", "code", "said"),
    [
        (("--revision", "v9"), {}, 78, "org/tiny has no revision 'v9'"),
        ((), {"HF_HUB_OFFLINE": "1"}, 78, "HF_HUB_OFFLINE forbids fetching it"),
        ((), {"HF_ENDPOINT": "http://127.0.0.1:9"}, 74, "Check the network"),
        (("--hub", "modelscope"), {}, 78, "pip install modelscope"),
        (("--model", "embedded", "--revision", "v9"), {}, 78, "model.revision is for models of a hub"),
    ],
)
def test_it_says_why_it_cannot_start(
    start: Callable[..., Daemon], arguments: tuple[str, ...], variables: dict[str, str], code: int, said: str
) -> None:
    daemon = start(*arguments, **variables)

    assert daemon.exit_code() == code
    assert said in daemon.log_text()


def test_a_template_in_a_file_is_the_one_that_is_used(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    file = tmp_path / "broken.jinja"
    file.write_text("{% if %}")
    daemon = start_daemon("--chat-template", str(file))

    assert daemon.exit_code() == 78
    assert "broken.jinja: the chat template is wrong in line 1" in daemon.log_text()
