"""`infd chat` up to its terminal: its requests, history, output, and errors without a server."""

from __future__ import annotations

import asyncio
import io
import json
import os
import socket
import stat
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

from infd.chat import commands
from infd.chat.client import AnswerPart, ChatClient, Ending, Turn
from infd.chat.conversation import Conversation, read_schema
from infd.chat.screen import Plain, Terminal
from infd.chat.talk import answer
from infd.errors import KeyRefused, NotAnswered, StartError, UsageError
from infd.http.auth import Keys
from tests.http.endpoint import serving
from tests.http.model import MODEL
from tests.http.scripted import speaking

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

HI = [Turn("user", "hi")]
ASKED: dict[str, Any] = {"seed": 0}


async def ask(client: ChatClient, options: dict[str, Any] = ASKED) -> list[AnswerPart | Ending]:
    return await asyncio.to_thread(lambda: list(client.ask(HI, options)))


async def test_an_answer_comes_in_words_with_its_thoughts_apart():
    async with speaking("<think>\nhm\n</think>\n\nYes, é.") as endpoint:
        *words, ending = await ask(ChatClient(endpoint.url + "/v1/"))
        models = await asyncio.to_thread(ChatClient(endpoint.url).models)

    assert "".join(each.thought for each in words if isinstance(each, AnswerPart)) == "hm"
    assert "".join(each.content for each in words if isinstance(each, AnswerPart)) == "Yes, é."
    assert len(words) > 3
    assert isinstance(ending, Ending)
    assert (ending.finish, ending.tokens) == ("stop", len("<think>\nhm\n</think>\n\nYes, é.".encode()) + 1)
    assert ending.tokens_s is not None
    assert models == [MODEL, "alias"]


async def test_closing_the_answer_ends_the_servers_work():
    async with speaking("on and " * 1000) as endpoint:

        def leave() -> None:
            coming = ChatClient(endpoint.url).ask(HI, ASKED)
            next(coming)
            coming.close()

        await asyncio.to_thread(leave)
        await endpoint.idle()
        assert endpoint.engine.status().pages_referenced == 0


async def test_without_a_server_the_message_names_infd_start(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", f"unix:{tmp_path}/none.sock"):
        with pytest.raises(NotAnswered, match=r"no daemon answers at .*: start a daemon with `infd start`|infd start"):
            await ask(ChatClient(url))


async def test_a_refusal_shows_the_servers_message():
    async with serving(keys=Keys.of("secret")) as endpoint:
        with pytest.raises(KeyRefused, match="INFD_API_KEY or with --key-file") as refused:
            await ask(ChatClient(endpoint.url))
        assert refused.value.exit_code == os.EX_NOPERM
        assert await ask(ChatClient(endpoint.url, "secret"), {**ASKED, "max_tokens": 2})
        with pytest.raises(NotAnswered, match="model 'x' is not served here"):
            await ask(ChatClient(endpoint.url, "secret"), {**ASKED, "model": "x"})


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b'data: {"error": {"message": "the server stopped"}}\n\ndata: [DONE]\n\n', "the server stopped"),
        (b'data: {"choices": []}\n\n', "broke off"),
        (
            b'data: {"choices": [{"finish_reason": "error", "error": {"message": "the answer left"}}]}\n\n',
            "the answer left",
        ),
        (b"data: {\n\n", "an event that is not a chat's"),
        (b'data: {"error": {"message": "\xff"}}\n\n', "an event that is not a chat's"),
        (b"", "broke off"),
    ],
)
async def test_a_failed_stream_raises_with_the_servers_message(answer: bytes, says: str):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"]}")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        with pytest.raises(NotAnswered, match=says):
            await ask(ChatClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), {"stop": ["x"]})


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:x", "http://[::1"])
def test_an_invalid_address_is_a_usage_error(url: str):
    with pytest.raises(UsageError, match="--url"):
        ChatClient(url)


def test_a_request_holds_the_whole_conversation_and_only_set_options():
    conversation = Conversation(system="Be brief.", temperature=0.5, max_tokens=None)
    conversation.say("a")
    conversation.answered("b")
    conversation.say("c")

    assert [(turn.role, turn.content) for turn in conversation.messages] == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]
    assert conversation.options == {"temperature": 0.5}
    conversation.thinking = False
    assert conversation.options["chat_template_kwargs"] == {"enable_thinking": False}


class Interrupted:
    """A client whose answer is stopped by Ctrl-C, or fails."""

    def __init__(self, *words: str, error: BaseException) -> None:
        self.words, self.error = words, error

    def ask(self, messages: list[Turn], options: dict[str, Any]) -> Generator[AnswerPart]:
        for word in self.words:
            yield AnswerPart(content=word)
        raise self.error


def test_an_interrupted_answer_keeps_its_text_so_far(capsys: pytest.CaptureFixture[str]):
    conversation = Conversation()
    conversation.say("count")
    client: Any = Interrupted("one ", "two", error=KeyboardInterrupt())

    assert not answer(client, conversation, Plain())
    assert [turn.content for turn in conversation.turns] == ["count", "one two"]
    assert capsys.readouterr().out == "one two\n"


def test_a_question_that_got_no_answer_is_undone():
    conversation = Conversation()
    conversation.say("count")
    client: Any = Interrupted(error=NotAnswered("no"))

    with pytest.raises(NotAnswered):
        answer(client, conversation, Plain())
    assert conversation.turns == []


def test_commands_match_their_help(tmp_path: Path):
    conversation = Conversation()
    conversation.say("a")
    file = tmp_path / "saved.json"

    assert commands.run("/system Be  brief.", conversation)
    assert conversation.system == "Be  brief."
    for choice, thinking in [("on", True), ("off", False), ("", None)]:
        assert commands.run(f"/thinking {choice}", conversation)
        assert conversation.thinking is thinking
    assert "/thinking on" in (commands.run("/thinking perhaps", conversation) or "")
    assert commands.run(f"/save {file}", conversation) == f"2 messages in {file}"
    assert json.loads(file.read_bytes())["messages"][1] == {"role": "user", "content": "a"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "exists" in (commands.run(f"/save {file}", conversation) or "")
    assert commands.run("/clear", conversation)
    assert [turn.role for turn in conversation.messages] == ["system"]
    assert "/help" in (commands.run("/nonsense", conversation) or "")
    assert commands.run("/quit", conversation) is None
    for name in commands.HELP.split():
        if name.startswith("/"):
            assert "is no command" not in (commands.run(name, conversation) or "")


def test_on_a_terminal_thoughts_are_dim_and_nothing_steers_it():
    shown = io.StringIO()
    screen = Terminal(Console(file=shown, force_terminal=True, color_system="standard", highlight=False))
    screen.think("hm \x1b[2J\r[bold]")
    screen.say("yes\x9b[1m\n")
    screen.end(Ending("length", 1, 2.0))

    text = shown.getvalue()
    assert "\x1b[2;3mhm \ufffd[2J\ufffd[bold]\x1b[0m\n\nyes\ufffd[1m\n" in text
    assert "1 token, 2.0/s, cut off" in text
    assert "\x1b[2J" not in text
    assert "\x9b" not in text


def test_a_pipe_gets_only_the_answer(capsys: pytest.CaptureFixture[str]):
    screen = Plain()
    screen.think("hm")
    screen.say("yes")
    screen.remark("a remark")
    screen.end(Ending("stop", 1, 2.0))

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("yes\n", "a remark\n")

    screen.end(Ending("length", 1, 2.0))
    assert capsys.readouterr().err == "cut off by length\n"


def test_a_schema_is_sent_as_it_is_written(tmp_path: Path):
    file = tmp_path / "schema.json"
    file.write_bytes(b' {"enum": [1.0, 1e400, 12345678901234567890123]}\n')
    conversation = Conversation(response_format=read_schema(file))

    assert msgspec.json.encode(conversation.options) == (
        b'{"response_format":{"type":"json_schema","json_schema":'
        b'{"name":"answer","schema":{"enum": [1.0, 1e400, 12345678901234567890123]},"strict":true}}}'
    )


@pytest.mark.parametrize(
    ("content", "says", "code"),
    [
        (None, "No such file", os.EX_USAGE),
        (b"{", "not JSON", os.EX_DATAERR),
        (b"\xff", "not JSON", os.EX_DATAERR),
        (b"[" * 100_000, "not JSON", os.EX_DATAERR),
        (b"3", "object or a", os.EX_DATAERR),
    ],
    ids=["none", "cut", "latin", "deep", "number"],
)
def test_a_file_without_a_schema_ends_with_the_code_of_bad_input(
    tmp_path: Path, content: bytes | None, says: str, code: int
):
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartError, match=says) as failed:
        read_schema(file)
    assert failed.value.exit_code == code
