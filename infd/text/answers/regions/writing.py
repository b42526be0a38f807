"""Derive how calls are written from a response template, which describes how they are read.

A call whose region contains JSON can be forced: its name is in the JSON, or a group of the text that opens the region.
The derived syntax is used only if the template reads the calls back that are written so.
"""

from __future__ import annotations

from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as syntax  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, Final

from infd.constraint import CallSyntax
from infd.text.answers.regions.contents import PLACEHOLDER

if TYPE_CHECKING:
    from infd.text.answers.regions.fields import Field

_NAME: Final = "$name"
_ARGUMENTS: Final = "$arguments"


class Unwritten(Exception):
    """The template's calls cannot be derived. The text completes "its response_template describes "."""


def call_syntax(field: Field, marks: tuple[str, ...]) -> CallSyntax:
    """Return the syntax of the calls of a template's field of calls. Raises Unwritten."""
    stated = field.stated
    if stated.content != "json":
        raise Unwritten("calls that are not JSON")
    if stated.content_args.get("string_delims") or stated.content_args.get("unquoted_keys"):
        raise Unwritten("calls whose strings or keys are not those of JSON")
    opening = _written(stated.open, stated.open_pattern)
    closing = _written(stated.close, stated.close_pattern)
    trigger = opening.partition(_NAME)[0]
    if not trigger or not closing:
        raise Unwritten("calls without marks before and after them")
    body = _body(stated.transform, each=stated.transform_each)
    if (_NAME in opening) == (_NAME in body):
        raise Unwritten("calls whose name is in none or several of its texts")
    if stated.transform_each:
        return CallSyntax(begin=f"{opening}[", call=body, between=", ", end=f"]{closing}", trigger=trigger, marks=marks)
    between = "" if stated.repeats else None
    return CallSyntax(call=f"{opening}{body}{closing}", between=between, trigger=trigger, marks=marks)


def _body(transform: Any, *, each: bool) -> str:
    """Return the JSON of a call from which `transform` takes the name and the arguments. Raises Unwritten."""
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if function in (None, "{content}"):
        return f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}'
    if not isinstance(function, dict):
        raise Unwritten("a call's name and arguments in other values than an object's members")
    name = _path(function.get("name"), each=each)
    arguments = _path(function.get("arguments", function.get("parameters")), each=each)
    if name and arguments:
        return f'{{"{name}": "{_NAME}", "{arguments}": {_ARGUMENTS}}}'
    if arguments or name:
        raise Unwritten("a call's name beside the JSON of its arguments")
    return _ARGUMENTS  # the name is in the text that opens the region


def _path(placeholder: Any, *, each: bool) -> str:
    """Return the member of the call's object that a placeholder names; empty: the whole content, or a group's text."""
    found = PLACEHOLDER.fullmatch(placeholder) if isinstance(placeholder, str) else None
    if found is None:
        raise Unwritten("a call's name or arguments as other values than the placeholders of one text")
    keys = found[1].split(".")
    if each and len(keys) == 1:
        return keys[0]
    if not each and keys[0] == "content" and len(keys) == 2:
        return keys[1]
    if not each and len(keys) == 1:
        return ""
    raise Unwritten("a call's name or arguments within nested objects")


def _written(literal: str | list[str] | None, pattern: str | None) -> str:
    """Return a text that opens or closes a region, with $name in place of the group `name`. Raises Unwritten."""
    if pattern is None:
        return literal if isinstance(literal, str) else literal[0] if literal else ""
    return _shortest(syntax.parse(pattern))


def _shortest(items: Any) -> str:
    """Return a short text that a parsed pattern matches; of alternatives, the first that is not empty."""
    text = ""
    for code, value in items:
        if code is codes.LITERAL:
            text += chr(value)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, _, repeated = value
            text += _shortest(repeated) * least if least else ""
        elif code is codes.SUBPATTERN:
            text += _NAME if value[0] is not None and value[0] in _named(items) else _shortest(value[3])
        elif code is codes.BRANCH:
            text += next(filter(None, map(_shortest, value[1])), "")
        elif code is not codes.AT:
            raise Unwritten("calls after a pattern that leaves a character open")
    return text


def _named(items: Any) -> set[int]:
    """Return the number of the group `name` of a parsed pattern; empty if there is none."""
    return {number for name, number in items.state.groupdict.items() if name == "name"}
