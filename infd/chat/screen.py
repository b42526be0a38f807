"""Output of a conversation.

A terminal shows thoughts (dim), answers and remarks (colored). A pipe receives only the answers; remarks then go to
standard error, and thoughts are dropped.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from infd.chat.client import Ending

# Control characters are replaced, so that a model's text cannot control the terminal.
_HARMLESS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"}


class Screen(Protocol):
    """Output for thoughts, answers and remarks."""

    def think(self, text: str) -> None:
        """Write part of a thought."""

    def say(self, text: str) -> None:
        """Write part of an answer."""

    def end(self, ending: Ending | None) -> None:
        """Write the end of an answer; None: the user stopped the answer."""

    def remark(self, text: str) -> None:
        """Write a line that is not part of the conversation."""


class Terminal:
    """The Screen of a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._thinking = False
        self._column_zero = True

    def think(self, text: str) -> None:
        self._thinking = True
        self._write(text, "dim italic")

    def say(self, text: str) -> None:
        if self._thinking:
            self._thinking = False
            self._write("\n\n", "")
        self._write(text, "")

    def end(self, ending: Ending | None) -> None:
        self._thinking = False
        if not self._column_zero:
            self._write("\n", "")
        self._console.print(Text(_summary(ending), "dim"), soft_wrap=True)
        self._console.print()

    def remark(self, text: str) -> None:
        self._console.print(Text(text.translate(_HARMLESS), "cyan"), soft_wrap=True)

    def _write(self, text: str, style: str) -> None:
        self._column_zero = text.endswith("\n")
        self._console.print(Text(text.translate(_HARMLESS), style), end="", soft_wrap=True)
        self._console.file.flush()


class Plain:
    """The Screen of a pipe: answers on standard output, remarks on standard error."""

    def __init__(self) -> None:
        self._last = ""

    def think(self, text: str) -> None:
        pass

    def say(self, text: str) -> None:
        self._last = text
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self, ending: Ending | None) -> None:
        if not self._last.endswith("\n"):
            self.say("\n")
        if ending is not None and (cut := _cut(ending)):
            self.remark(cut)

    def remark(self, text: str) -> None:
        print(text, file=sys.stderr)


def _summary(ending: Ending | None) -> str:
    if ending is None:
        return "(stopped)"
    facts = []
    if ending.tokens is not None:
        facts.append(f"{ending.tokens} token{'s' * (ending.tokens != 1)}")
    if ending.tokens_s:
        facts.append(f"{ending.tokens_s:.1f}/s")
    if cut := _cut(ending):
        facts.append(cut)
    return ", ".join(facts)


def _cut(ending: Ending) -> str:
    """Return the reason why an answer is incomplete; empty for a complete answer."""
    return {"": "", "stop": "", "length": "cut off by length"}.get(ending.finish, ending.finish)
