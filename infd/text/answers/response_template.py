"""The `response_template` of a checkpoint's tokenizer_config.json, which describes how answers are parsed.

An answer consists of regions: fields of the message, each between a text or pattern that opens it and one that closes
it; the field without an opening is the text outside of other regions. Text is streamed, without white space at both
ends; a call is emitted once its region is closed. A malformed or cut region of a call is content, and so is every field
other than thoughts and calls. If a field repeats, its parts are joined by the template's `join`.

The patterns are the checkpoint's, so `infd/text/patterns.py` matches them in a limited number of steps. If an answer
exceeds its steps, its rest is content. A text that opens or closes a region has at most _DELIMITER_CHARACTERS.

Source: transformers' documentation of response templates, version 1.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.constraint import Thought
from infd.errors import CheckpointError
from infd.text.answers.regions.fields import CALLS, THOUGHTS, Field, Template, delimiter
from infd.text.answers.regions.parser import STEPS, RegionsParser
from infd.text.answers.regions.writing import Unwritten, call_syntax
from infd.text.markup import Asides
from infd.text.patterns import Refused, Steps
from infd.text.tools.offered import Offered

if TYPE_CHECKING:
    from infd.constraint import CallSyntax, Header
    from infd.text.chat import ChatTemplate

_MOST_FIELDS: Final = 16
_PROBE: Final = "probe_name"
_TOKENS: Final = re.compile(r"<[^<>\s]{1,64}>|\[[^\[\]\s]{1,64}\]")


class ResponseTemplate:
    """The AnswerSyntax that a checkpoint's response template describes."""

    grammar: CallSyntax | None = None
    unforced = ""  # why `grammar` is None

    def __init__(self, stated: Any) -> None:
        """Raises CheckpointError for a template that is malformed, or whose patterns are refused."""
        try:
            template = msgspec.convert(stated, Template)
            if template.version != 1 or not 0 < len(template.fields) <= _MOST_FIELDS:
                raise Refused("another version, no field, or more than 16 fields")
            self.fields = {name: Field(name, field) for name, field in template.fields.items()}
            self._anchor = delimiter(template.start_anchor, template.start_anchor_pattern)
        except (msgspec.ValidationError, Refused) as error:
            raise CheckpointError(f"tokenizer_config.json's response_template: {error}") from error
        if sum(field.opens is None for field in self.fields.values()) > 1:
            raise CheckpointError("tokenizer_config.json's response_template: two fields without `open`")
        delimiters = [
            each for field in self.fields.values() for each in (field.opens, field.closes) if each is not None
        ]
        self._begins = re.compile("|".join(each.beginning for each in delimiters if each.beginning) or r"(?!)")
        try:
            self.grammar = self._call_syntax()
        except Unwritten as reason:
            self.unforced = f"its response_template describes {reason}; --tool-parser can name a syntax"

    def _call_syntax(self) -> CallSyntax:
        """Return the syntax in which calls are forced. Raises Unwritten."""
        if CALLS not in self.fields:
            raise Unwritten("no calls")
        found = call_syntax(self.fields[CALLS], self.marks)
        call, arguments = found.call.replace("$name", _PROBE), ('{"a": "b"}', "{}")
        calls = [
            call.replace("$arguments", each) for each in (arguments if found.between is not None else arguments[:1])
        ]
        parser, asides = self._begun("", Offered({_PROBE: b""})), Asides()
        text = found.begin + (found.between or "").join(calls) + found.end
        content = parser.feed(text, asides) + parser.finish(asides)
        aside = asides.take()
        read = [] if aside is None else [(each.name, json.loads(each.arguments)) for each in aside.calls]
        if content.strip() or read != [(_PROBE, json.loads(each)) for each in arguments[: len(calls)]]:
            raise Unwritten("calls of which infd cannot derive how they are written")
        return found

    @property
    def reads_calls(self) -> bool:
        return CALLS in self.fields

    @property
    def marks(self) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for field in self.fields.values():
            for pattern in (field.opens, field.closes):
                for text in [] if pattern is None else pattern.literals():
                    found |= dict.fromkeys([text, *_TOKENS.findall(text)])
            for value in _texts(field.stated.content_args):
                found |= dict.fromkeys([value, *_TOKENS.findall(value)])
        return tuple(found)

    def matches(self, template: ChatTemplate) -> bool:
        return False  # `Syntax.choose` uses the response template if no other syntax matches

    def thought(self, prompt: str, continued: str) -> Thought | None:
        field = next((self.fields[name] for name in THOUGHTS if name in self.fields), None)
        if field is None or field.opens is None or field.closes is None or continued.strip():
            return None
        opening, closing = _only(field.stated.open), _only(field.stated.close)
        begun = self._begun(prompt)
        if not opening or not closing or begun.current not in (field, begun.implicit):
            return None
        return Thought(opening.strip(), closing.strip(), inside=begun.current is field)

    def header(self, prompt: str, continued: str) -> Header | None:
        return None

    def ends(self, *, calls: bool) -> tuple[str, ...]:
        thought = self.thought("", "")
        return () if thought is None else (thought.closing,)

    def start(self, prompt: str, continued: str, offered: Offered | None) -> RegionsParser:
        return self._begun(prompt + continued, offered)

    def _begun(self, prompt: str, offered: Offered | None = None) -> RegionsParser:
        """Return a parser that has consumed the part of the message that the prompt contains."""
        parser = RegionsParser(tuple(self.fields.values()), self._begins, offered)
        at, end = 0, None
        while self._anchor is not None and (found := self._anchor.search(prompt, at, Steps(STEPS), ended=True)):
            end = found.end
            at = max(found.end, found.start + 1)
        if end is not None:
            parser.skip(prompt[end:])
        return parser


def _only(literal: str | list[str] | None) -> str:
    """Return the first text that opens or closes a region; empty for a pattern."""
    return literal if isinstance(literal, str) else literal[0] if literal else ""


def _texts(value: Any) -> list[str]:
    """Return all texts in the arguments of a field."""
    match value:
        case str():
            return [value]
        case list():
            return [text for each in value for text in _texts(each)]
        case dict():
            return [text for each in value.values() for text in _texts(each)]
    return []
