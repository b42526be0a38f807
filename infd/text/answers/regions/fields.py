"""The fields of a response template, as tokenizer_config.json states them, checked."""

from __future__ import annotations

import json
from typing import Any, Final

from msgspec import Struct

from infd.text.patterns import Pattern, Refused

THOUGHTS: Final = ("thinking", "reasoning_content", "reasoning")
CALLS: Final = "tool_calls"
_SETTINGS_CHARACTERS: Final = 4096
_STRUCTURED: Final = frozenset({"json", "xml-inline", "kv-lines"})


class Stated(Struct, forbid_unknown_fields=True):
    """A field as written in tokenizer_config.json."""

    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False


class Template(Struct, forbid_unknown_fields=True):
    """A response template as written in tokenizer_config.json."""

    fields: dict[str, Stated]
    version: int = 1
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None


class Field:
    """One field of a response template, checked."""

    def __init__(self, name: str, stated: Stated) -> None:
        """Raises CheckpointError or Refused."""
        self.name = name
        self.stated = stated
        self.opens = delimiter(stated.open, stated.open_pattern)
        self.closes = delimiter(stated.close, stated.close_pattern)
        self.streams = name != CALLS and stated.content not in _STRUCTURED
        self.strips = bool(stated.content_args.get("strip", True))
        self.tag: Pattern | None = None
        if stated.content not in (*_STRUCTURED, "text", "int", "float", "bool"):
            raise Refused(f"content of the kind {stated.content!r}")
        if len(json.dumps([stated.transform, stated.content_args])) > _SETTINGS_CHARACTERS:
            raise Refused("a field whose settings are longer than 4,096 characters")
        if _nests_tags(stated.content_args.get("value_parser")):
            raise Refused("tags within the values of tags")
        if stated.content == "xml-inline":
            self.tag = Pattern(str(stated.content_args.get("tag_pattern", "")))
            if not self.tag.begins_plainly or "key" not in self.tag.groups:
                raise Refused("a tag_pattern that may begin with any character, or has no group `key`")


def delimiter(literal: str | list[str] | None, pattern: str | None) -> Pattern | None:
    """Return the pattern of a text that opens or closes a region. Raises Refused."""
    if literal is not None and pattern is not None:
        raise Refused("both a text and a pattern")
    if literal is None and pattern is None:
        return None
    literals = [literal] if isinstance(literal, str) else literal or []
    if pattern is None and not (literals and all(literals)):
        raise Refused("an empty text")
    found = Pattern(pattern) if pattern is not None else Pattern.of(literals)
    if not found.begins_plainly:
        raise Refused(f"{pattern!r} may begin with any character")
    return found


def _nests_tags(parser: Any) -> bool:
    """Return whether the parser of a value, or a parser within it, is "xml-inline"."""
    while isinstance(parser, dict):
        if parser.get("name") == "xml-inline":
            return True
        arguments = parser.get("args")
        parser = arguments.get("value_parser") if isinstance(arguments, dict) else None
    return False


# The rest of an answer that cannot be parsed further.
REST: Final = Field("content", Stated(content_args={"strip": False}))
