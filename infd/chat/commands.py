"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.chat.conversation import Conversation

    Command = Callable[[Conversation, str], str]

HELP = """\
/system TEXT         how the model is to answer; without TEXT, nothing special
/thinking on|off     whether it thinks before it answers; without either, as it likes
/clear               forget what was said
/save FILE           write the conversation to a new file, as JSON
/help                this
/quit                leave, as Ctrl-D does
Ctrl-C stops an answer. A line that ends in \\ goes on in the next."""


def run(line: str, conversation: Conversation) -> str | None:
    """Run a command and return the line to show; None: end the conversation."""
    name, _, argument = line.partition(" ")
    if name in ("/quit", "/exit"):
        return None
    command = _COMMANDS.get(name)
    return f"{name} is no command; /help lists them" if command is None else command(conversation, argument.strip())


def _system(conversation: Conversation, text: str) -> str:
    conversation.system = text
    return "the model hears this first" if text else "the model hears nothing first"


def _thinking(conversation: Conversation, choice: str) -> str:
    known = {"on": True, "off": False, "": None}
    if choice not in known:
        return "/thinking on, /thinking off, or /thinking alone to let the model decide"
    conversation.thinking = known[choice]
    return {True: "it thinks first", False: "it answers at once", None: "it does as it likes"}[conversation.thinking]


def _clear(conversation: Conversation, _: str) -> str:
    conversation.clear()
    return "forgotten"


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "/save FILE"
    path = Path(name).expanduser()
    data = msgspec.json.format(msgspec.json.encode({"messages": conversation.messages}))
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data + b"\n")
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{len(conversation.messages)} messages in {path}"


_COMMANDS: dict[str, Command] = {
    "/system": _system,
    "/thinking": _thinking,
    "/clear": _clear,
    "/save": _save,
    "/help": lambda *_: HELP,
}
