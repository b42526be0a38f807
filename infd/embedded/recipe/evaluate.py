"""Evaluate the embedded model: `python -m infd.embedded.recipe.evaluate [MODEL]`.

Starts a daemon with the model and sends it the held-out questions over HTTP, with
temperature 0. The scores therefore measure the whole server, including its parsers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
from collections import defaultdict
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import click
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from infd.embedded.recipe import heldout
from infd.embedded.recipe.judge import meets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.embedded.recipe.conversation import Conversation

AT_ONCE: Final = 16
MAX_TOKENS: Final = 400


class Answer(Struct, frozen=True):
    """The daemon's answer to one question."""

    question: Conversation
    content: str
    reasoning: str
    calls: list[dict[str, Any]]
    finish_reason: str

    @property
    def right(self) -> bool:
        """Whether the answer meets the question's Expect."""
        return meets(self.question.expect, self.content, self.calls)

    @property
    def well_formed(self) -> bool:
        """Whether the text contains no tag, and the answer has reasoning if and only if thinking was requested."""
        tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        return not any(tag in self.content for tag in tags) and bool(self.reasoning) == self.question.thinking


@asynccontextmanager
async def daemon(model: str, dtype: str) -> AsyncIterator[str]:
    """Run a daemon that serves `model`, and yield the daemon's URL."""
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        (Path(directory) / "infd.toml").touch()
        command = [sys.executable, "-m", "infd", "start", "--config", f"{directory}/infd.toml", "--model", model]
        command += ["--port", str(port), "--admin-socket", f"{directory}/admin.sock", "--dtype", dtype, "--no-banner"]
        with (Path(directory) / "log").open("wb+") as log:
            process = await asyncio.create_subprocess_exec(*command, stderr=log, stdout=log)
            try:
                url = f"http://127.0.0.1:{port}"
                async with aiohttp.ClientSession() as session:
                    while process.returncode is None and not await _ready(session, url):  # noqa: ASYNC110 (another process)
                        await asyncio.sleep(0.1)
                if process.returncode is not None:
                    log.seek(0)
                    raise click.ClickException(f"infd did not start:\n{log.read().decode()}")
                yield url
            finally:
                if process.returncode is None:
                    process.terminate()
                    await process.wait()


async def _ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/readyz") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def ask(url: str, questions: list[Conversation]) -> list[Answer]:
    """Send the questions, at most AT_ONCE at a time, and return the answers in the questions' order."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(session: aiohttp.ClientSession, question: Conversation) -> Answer:
        body = {
            "messages": [_sent(message) for message in question.messages[:-1]],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "chat_template_kwargs": {"enable_thinking": question.thinking},
        }
        if question.tools:
            body["tools"] = question.tools
        async with places, session.post(f"{url}/v1/chat/completions", json=body) as response:
            said = await response.json()
        if "error" in said:
            raise click.ClickException(f"{said['error']['message']}: {body}")
        choice = said["choices"][0]
        message = choice["message"]
        calls = [
            {"name": call["function"]["name"], "arguments": _arguments(call["function"]["arguments"])}
            for call in message.get("tool_calls") or []
        ]
        return Answer(
            question, message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"]
        )

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        return await asyncio.gather(*(one(session, question) for question in questions))


def _arguments(text: str) -> Any:
    """Return a call's arguments, parsed from JSON. If `text` is not JSON, return `text`, which no Expect matches."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls encoded as JSON strings, as in API requests."""
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


def scores(answers: list[Answer]) -> dict[str, tuple[int, int]]:
    """Return (correct answers, questions) by row of the model card's table."""
    rows: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        rows[answer.question.kind].append(answer.right)
        if answer.question.thinking or answer.question.expect.calls:
            rows["well-formed blocks"].append(answer.well_formed)
        if answer.question.thinking:
            rows["thought about first"].append(answer.right)
        if answer.question.expect.calls:
            rows["calls alone"].append(answer.right)
    return {row: (sum(right), len(right)) for row, right in sorted(rows.items())}


async def _examine(model: str, dtype: str, questions: list[Conversation]) -> list[Answer]:
    async with daemon(model, dtype) as url:
        return await ask(url, questions)


@click.command()
@click.argument("model", default="embedded")
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--wrong", is_flag=True, help="Show the answers that were wrong.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
def main(model: str, dtype: str, wrong: bool, as_json: bool) -> None:
    """Send MODEL the held-out questions, and print its scores."""
    answers = asyncio.run(_examine(model, dtype, heldout.read()))
    if wrong:
        for answer in answers:
            if not (answer.right and answer.well_formed):
                asked = answer.question.messages[-2]["content"]
                print(f"[{answer.question.kind}] {asked!r}\n  said {answer.content!r} {answer.calls or ''}", end="")
                print(f"\n  want {answer.question.messages[-1].get('content')!r} {answer.question.expect.calls or ''}")
    table = scores(answers)
    if as_json:
        print(json.dumps(table))
        return
    shown = Table("subject", "right", "of", "share")
    for row, (right, count) in table.items():
        shown.add_row(row, str(right), str(count), f"{right / count:.1%}")
    Console().print(shown)


if __name__ == "__main__":
    main()
