"""What has been said, and what is asked with it."""

from __future__ import annotations

from typing import Any

from infd.chat.client import Turn


class Conversation:
    """The turns so far, and how the next answer is asked for.

    options   of every request: model, temperature, max_tokens
    thinking  whether the model is to think first; None: as it does by itself
    """

    def __init__(self, *, system: str = "", thinking: bool | None = None, **options: Any) -> None:
        self.system = system
        self.thinking = thinking
        self.turns: list[Turn] = []
        self._options = {name: value for name, value in options.items() if value is not None}

    @property
    def messages(self) -> list[Turn]:
        return [Turn("system", self.system), *self.turns] if self.system else list(self.turns)

    @property
    def options(self) -> dict[str, Any]:
        if self.thinking is None:
            return self._options
        return self._options | {"chat_template_kwargs": {"enable_thinking": self.thinking}}

    def say(self, text: str) -> None:
        self.turns.append(Turn("user", text))

    def answered(self, text: str) -> None:
        """An answer came, or the part of it that somebody had the patience for. Without any the question is undone."""
        if text:
            self.turns.append(Turn("assistant", text))
        elif self.turns and self.turns[-1].role == "user":
            self.turns.pop()

    def clear(self) -> None:
        """Forget what was said, not how to answer."""
        self.turns.clear()
