"""Calls in the syntax of Python: [f(a=1, b="x"), g()].

A family is a `Pythonic`, a row of a table. Arguments are keyword arguments, whose values are literals of Python. The
parser translates them into JSON while the model writes them. A word that is no literal is a string, because some
templates write strings without quotes.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.constraint import CallSyntax
from infd.text.tools.marked import MarkedCalls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.markup import Asides
    from infd.text.tools.offered import Offered

_HEAD_CHARACTERS: Final = 512
_WORD_CHARACTERS: Final = 256  # longer words are strings, emitted in parts, so that no token scans all of them again
_BARE: Final = " "  # the value of `_quote` within a string without quotes
_NAME: Final = r"\w[\w.:/-]*+"
_HEAD: Final = re.compile(rf"\s*+(?P<name>{_NAME})\(\s*+(?:(?=\))|(?=[A-Za-z_]\w*+\s*+=(?=[^=])))")
_COULD_BE_A_HEAD: Final = re.compile(rf"\s*+(?:\Z|{_NAME}(?:\Z|\(\s*+(?:\Z|[A-Za-z_]\w*+\s*+(?:\Z|=\Z))))", re.DOTALL)
_KEY: Final = re.compile(r"\s*+,?+\s*+(?P<key>[A-Za-z_]\w*+)\s*+=\s*+(?=\S)")
_COULD_BE_A_KEY: Final = re.compile(r"\s*+,?+\s*+(?:\Z|[A-Za-z_]\w*+\s*+(?:\Z|=\s*+\Z))")
_WORD: Final = re.compile(r"""[^\s()\[\]{},:'"]++""")
_PLAIN: Final = re.compile(r"""[^'"\\]++""")
_ESCAPE: Final = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
_ESCAPE_CHARACTERS: Final = 10
_ESCAPED: Final = {"/": "/", "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_CLOSING: Final = {"(": "]", "[": "]", "{": "}"}


class Pythonic(Struct, frozen=True, kw_only=True):
    """One family; see ToolSyntax.

    bare    whether the answer may begin with a list of calls without a mark
    listed  whether brackets enclose the calls; if not, each call is on a line of its own
    """

    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()
    bare: bool = False
    listed: bool = True
    grammar: CallSyntax | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        return self.opens + self.closes

    def start(self, offered: Offered) -> PythonicParser:
        return PythonicParser(self)


class PythonicParser(MarkedCalls):
    """Parses one answer."""

    def __init__(self, family: Pythonic) -> None:
        super().__init__(family.opens)
        self._family = family
        self._arguments = 0  # number of arguments of the call so far
        self._literal = Literal()
        if family.bare:
            self._state = self._beginning

    def _fresh(self) -> PythonicParser:
        return PythonicParser(self._family)

    def _cut(self, rest: str, asides: Asides) -> None:
        if self._state == self._beginning:
            self._emit_content(rest)
        elif self._state in (self._opened, self._call):
            self._refuse(rest)
        elif self._state == self._value:
            asides.append_arguments(self._literal.cut(rest))

    def _beginning(self, _: Asides) -> bool:
        words = self._pending.lstrip()
        if not words and len(self._pending) <= _HEAD_CHARACTERS:
            return False
        self._state = self._opened if words.startswith("[") else self._between
        return True

    def _opened(self, _: Asides) -> bool:
        """Consume the bracket before the calls."""
        words = self._pending.lstrip()
        if not words and len(self._pending) <= _HEAD_CHARACTERS:
            return False
        if self._family.listed:
            if not words.startswith("["):
                self._refuse()
                return True
            used = len(self._pending) - len(words) + 1
            self._opening += self._pending[:used]
            self._pending = self._pending[used:]
        self._state = self._call
        return True

    def _call(self, asides: Asides) -> bool:
        """Consume a name, up to the arguments."""
        head = _HEAD.match(self._pending)
        if head is not None:
            self._begin_call(head["name"], asides)
            asides.append_arguments("{")
            self._pending = self._pending[head.end() :]
            self._arguments = 0
            self._state = self._argument
            return True
        if _COULD_BE_A_HEAD.match(self._pending) and len(self._pending) <= _HEAD_CHARACTERS:
            return False
        self._refuse()
        return True

    def _argument(self, asides: Asides) -> bool:
        """Consume the name of an argument, or the end of the call."""
        pending = self._pending
        found = _KEY.match(pending)
        if found is not None:
            separator = ", " if self._arguments else ""
            asides.append_arguments(f"{separator}{json.dumps(found['key'])}: ")
            self._arguments += 1
            self._pending = pending[found.end() :]
            self._literal = Literal()
            self._state = self._value
            return True
        words = pending.lstrip(" \t\r\n,")
        if not words.startswith(")") and _COULD_BE_A_KEY.match(pending) and len(pending) <= _HEAD_CHARACTERS:
            return False
        asides.append_arguments("}")
        self._pending = words.removeprefix(")")
        self._state = self._called
        return True

    def _value(self, asides: Asides) -> bool:
        read, text = self._literal.feed(self._pending)
        asides.append_arguments(text)
        self._pending = self._pending[read:]
        if self._literal.ended:
            self._state = self._argument
        return self._literal.ended

    def _called(self, _: Asides) -> bool:
        """Consume the text after a call, up to the next call or the closing bracket."""
        pending = self._pending = self._pending.lstrip()
        if self._family.listed:
            if not pending:
                return False
            self._state = self._call if pending[0] == "," else self._closing
            self._pending = pending[pending[0] in ",]" :]
            return True
        if not pending:
            return False
        self._state = self._call if _NAME_BEGINS.match(pending) else self._closing
        return True

    def _closing(self, _: Asides) -> bool:
        """Consume the closing mark, which the model may omit."""
        pending = self._pending.lstrip()
        for mark in self._family.closes:
            if pending.startswith(mark):
                self._pending = pending[len(mark) :]
                self._state = self._between
                return True
            if mark.startswith(pending):
                self._pending = pending
                return False
        self._state = self._between
        return True


_NAME_BEGINS: Final = re.compile(r"\w")


class Literal:
    """Translates one literal of Python into JSON, in parts of any size.

    ended  whether the literal is complete
    """

    __slots__ = ("_brackets", "_comma", "_key", "_quote", "ended")

    def __init__(self) -> None:
        self.ended = False
        self._brackets: list[str] = []
        self._quote = ""  # quote of the open string; empty: no string is open
        self._comma = False  # whether a comma is held back, because Python allows a comma before a closing bracket
        self._key = False  # whether the next value is a key of a dict

    def feed(self, text: str) -> tuple[int, str]:
        """Return the number of characters translated, and their JSON. Pass the remaining text again with more text."""
        at, parts = 0, list[str]()
        while at < len(text) and not self.ended:
            used = self._string(text, at, parts) if self._quote else self._token(text, at, parts)
            if not used:
                break
            at += used
        return at, "".join(parts)

    def cut(self, rest: str) -> str:
        """Return the end of a literal that is cut: the text of a word that `feed` has not translated."""
        word = rest.strip()
        return "" if self._quote or self._key or not word else (", " if self._comma else "") + word

    def _token(self, text: str, at: int, parts: list[str]) -> int:
        """Translate one token outside of strings. Returns the token's length; 0 for an incomplete token or the end."""
        character = text[at]
        if character.isspace():
            return 1
        if not self._brackets and character in ",:)]}":  # the value is missing
            parts.append("null")
            self.ended = True
            return 0
        if character in "'\"":
            self._separate(parts)
            parts.append('"')
            self._quote = character
            return 1
        if character in "([{":
            self._separate(parts)
            self._brackets.append(character)
            parts.append("{" if character == "{" else "[")
            self._key = character == "{"
            return 1
        if character in ")]}":
            self._comma = False
            parts.append(_CLOSING[self._brackets.pop()])
            self._finish_value()
            return 1
        if character == ",":
            self._comma = True
            self._key = self._brackets[-1] == "{"
            return 1
        if character == ":":
            parts.append(": ")
            self._key = False
            return 1
        word = _WORD.match(text, at)
        assert word is not None
        if len(word[0]) >= _WORD_CHARACTERS:
            self._separate(parts)
            parts.append('"')
            self._quote = _BARE
            return self._string(text, at, parts)
        if word.end() == len(text):
            return 0
        self._separate(parts)
        parts.append(_word(word[0], key=self._key))
        self._finish_value()
        return len(word[0])

    def _string(self, text: str, at: int, parts: list[str]) -> int:
        """Translate a part of a string. Returns the number of characters translated."""
        if self._quote == _BARE:
            word = _WORD.match(text, at)
            if word is not None:
                parts.append(_encoded(word[0]))
                return len(word[0])
            parts.append('"')
            self._quote = ""
            self._finish_value()
            return 0 if self.ended else self._token(text, at, parts)
        if text[at] == self._quote:
            parts.append('"')
            self._quote = ""
            self._finish_value()
            return 1
        if text[at] == "\\":
            found = _ESCAPE.match(text, at)
            if found is None:
                if len(text) - at < _ESCAPE_CHARACTERS:
                    return 0
                parts.append("\\\\")
                return 1
            parts.append(_encoded(_unescaped(found[0])))
            return len(found[0])
        found = _PLAIN.match(text, at)
        plain = text[at] if found is None else found[0]
        parts.append(_encoded(plain))
        return len(plain)

    def _separate(self, parts: list[str]) -> None:
        """Emit the comma before a value."""
        if self._comma:
            parts.append(", ")
            self._comma = False

    def _finish_value(self) -> None:
        self._key = False
        self.ended = not self._brackets


def _word(word: str, *, key: bool) -> str:
    """Return the JSON of a word, which is a number, a constant, or a string that the model wrote without quotes."""
    literal = _WORDS.get(word, word)
    try:
        json.loads(literal, parse_constant=_no_constant)
    except ValueError:
        return json.dumps(word, ensure_ascii=False)
    return json.dumps(literal) if key else literal


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _unescaped(escape: str) -> str:
    kind = escape[1]
    if kind in "xuU":
        number = int(escape[2:], 16)
        return chr(number) if number <= sys.maxunicode else escape
    return _ESCAPED.get(kind, kind if kind in "\\'\"" else escape)


def _encoded(text: str) -> str:
    """Return a text as part of a JSON string.

    Surrogates are escaped, because the other half of a pair may be in another part of the string.
    """
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)[1:-1]


_CONSTANTS: Final = ("True", "False", "None")


def _forced(
    begin: str,
    between: str,
    end: str,
    *marks: str,
    trigger: str = "",
    otherwise: str = "",
    constants: tuple[str, str, str] = _CONSTANTS,
) -> CallSyntax:
    """Return the syntax in which a grammar forces calls. Values are JSON, but `constants` replace true, false, null."""
    return CallSyntax(
        begin=begin,
        call="$name($arguments)",
        between=between,
        end=end,
        parameter="$key=$value",
        separator=", ",
        quoted=True,
        constants=constants,
        trigger=trigger or marks[0],
        marks=marks,
        otherwise=otherwise,
    )


_START, _END = "<|tool_call_start|>", "<|tool_call_end|>"
_CALLS, _CALLED = "<function_calls>", "</function_calls>"
_PYTHON = ("<|python_start|>", "<|python_end|>")
# An answer without calls. Its first character is not "[", because llguidance's lexer chooses by this character alone
# between a call and an answer without calls.
_NO_CALL: Final = r"\s*(?:[^\s\[](?s:.)*)?"

FAMILIES: Final[Mapping[str, Pythonic]] = {
    "lfm2": Pythonic(opens=(_START,), closes=(_END,), grammar=_forced(f"{_START}[", ", ", f"]{_END}", _START, _END)),
    "olmo3": Pythonic(  # the template of OLMo 3.1 writes values in JSON
        opens=(_CALLS,),
        closes=(_CALLED,),
        listed=False,
        grammar=_forced(_CALLS, "\n", _CALLED, _CALLS, _CALLED, constants=("true", "false", "null")),
    ),
    "pythonic": Pythonic(
        opens=_PYTHON[:1],
        closes=_PYTHON[1:],
        bare=True,
        grammar=_forced("[", ", ", "]", *_PYTHON, trigger="[", otherwise=_NO_CALL),
    ),
}
ALIASES: Final[Mapping[str, str]] = {"llama4_pythonic": "pythonic", "toolace": "pythonic"}
