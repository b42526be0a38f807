"""The loop of a conversation: the user's message, then the model's answer, until the user ends the conversation."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from infd.chat import commands
from infd.chat.client import Ending
from infd.chat.history import input_history
from infd.chat.screen import Plain, Terminal
from infd.errors import NotAnswered, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from infd.chat.client import ChatClient
    from infd.chat.conversation import Conversation
    from infd.chat.screen import Screen


def talk(client: ChatClient, conversation: Conversation, history: Path | None) -> int:
    """Run a conversation and return the exit code. Raises NotAnswered, UsageError.

    On a terminal, each line of input is a message or a command. Otherwise all of standard input is one message.
    """
    screen: Screen = Terminal() if sys.stdout.isatty() else Plain()
    if not sys.stdin.isatty():
        if not (text := sys.stdin.read().strip()):
            raise UsageError("standard input holds no message; write one to it, or run `infd chat` on a terminal")
        conversation.say(text)
        return os.EX_OK if answer(client, conversation, screen) else 128 + signal.SIGINT
    screen.remark(f"{', '.join(client.models())} at {client.url}; /help, Ctrl-D to leave")
    with input_history(history):
        while _turn(client, conversation, screen):
            pass
    return os.EX_OK


def _turn(client: ChatClient, conversation: Conversation, screen: Screen) -> bool:
    """Read and handle one line. Returns False if the conversation ends. Ctrl-C at the prompt discards the line."""
    try:
        line = _read()
        if line.startswith("/"):
            remark = commands.run(line, conversation)
            if remark is None:
                return False
            screen.remark(remark)
        elif line:
            conversation.say(line)
            answer(client, conversation, screen)
    except NotAnswered as error:
        screen.remark(str(error))
    except EOFError:
        print()
        return False
    except KeyboardInterrupt:
        print()
    return True


def answer(client: ChatClient, conversation: Conversation, screen: Screen) -> bool:
    """Stream the model's answer to the screen, and append the answer to the conversation. Raises NotAnswered.

    Returns False if Ctrl-C stopped the answer.
    """
    texts: list[str] = []
    ending = None
    try:
        with closing(client.ask(conversation.messages, conversation.options)) as parts:
            for part in parts:
                if isinstance(part, Ending):
                    ending = part
                    continue
                if part.thought:
                    screen.think(part.thought)
                if part.content:
                    texts.append(part.content)
                    screen.say(part.content)
    except KeyboardInterrupt:
        ending = None
    finally:
        conversation.answered("".join(texts))
    screen.end(ending)
    return ending is not None


def _read() -> str:
    """Return the typed text; a line that ends in a backslash continues on the next. Raises EOFError on Ctrl-D."""
    lines: list[str] = []
    while (line := input("> " if not lines else ". ")).endswith("\\"):
        lines.append(line[:-1])
    return "\n".join([*lines, line]).strip()
