"""The `llm` package works with infd, over chat and over Responses, configured by its own file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Literal

import pydantic
import pytest

from tests.e2e.test_tool_loops import QUESTION, correct, get_weather

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

llm = pytest.importorskip("llm", reason="`make test-all` installs it")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore"),  # of the client's libraries
]

MODEL = """
- model_id: {name}
  model_name: embedded
  api_base: {url}
  supports_schema: true
  supports_tools: true
  responses: {responses}
"""


class Dog(pydantic.BaseModel):
    age: int = pydantic.Field(ge=0, le=20)
    kind: Literal["large", "small"]


@pytest.fixture(scope="module")
def directory(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package's settings and its log of answers."""
    directory = tmp_path_factory.mktemp("llm")
    models = (MODEL.format(name=name, url=url, responses=str(name == "responses").lower()) for name in APIS)
    (directory / "extra-openai-models.yaml").write_text("".join(models))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_USER_PATH", str(directory))
        yield directory


APIS = ("chat", "responses")


@pytest.fixture(params=APIS)
def model(directory: Path, request: pytest.FixtureRequest) -> Any:
    return llm.get_model(request.param)


def test_a_stream_gives_the_whole_answer(model: Any):
    whole = model.prompt("Hello!", temperature=0, stream=False).text()
    parts = list(model.prompt("Hello!", temperature=0))

    assert len(parts) > 3
    assert "".join(parts) == whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept(model: Any, stream: bool):
    Dog.model_validate_json(model.prompt("Invent a dog.", schema=Dog, temperature=0, stream=stream).text())


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_run_and_its_result_answered(model: Any, stream: bool):
    assert correct(model.chain(QUESTION, tools=[get_weather], options={"temperature": 0}, stream=stream).text())


def test_a_conversation_goes_on(model: Any):
    conversation = model.conversation()
    first = conversation.prompt("Hello!", temperature=0)
    first.text()
    second = conversation.prompt("And you?", temperature=0)
    second.text()

    assert second.usage().input > first.usage().input + first.usage().output


def test_the_command_prints_and_logs_an_answer(directory: Path):
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments]
        variables = {"PATH": os.environ["PATH"], "HOME": str(directory), "LLM_USER_PATH": str(directory)}
        ended = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    said = run("-m", "chat", "-o", "temperature", "0", "Hello!")
    (row,) = json.loads(run("logs", "--json"))

    assert (row["prompt"], row["response"]) == ("Hello!", said.removesuffix("\n"))
