"""Switch thoughts on or off, set their effort and announce their budget, through variables that a chat template reads.

Templates name these variables differently, and accept different values. This module lists the known names, and the
values that switch thoughts on and off; the template's source shows which variables and values the template reads.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.text.chat import ChatTemplate, Message

# For each variable, the value that switches thoughts on and the value that switches them off.
SWITCHES: Final[Mapping[str, tuple[Any, Any]]] = MappingProxyType(
    {
        "enable_thinking": (True, False),
        "thinking": (True, False),
        "reasoning": (True, False),
        "thinking_mode": ("enabled", "disabled"),
        "thinking_option": ("on", "off"),
    }
)
EFFORTS: Final = ("reasoning_effort", "thinking_effort", "reasoning_strength")
LEVELS: Final = ("minimal", "low", "medium", "high", "xhigh", "max")  # values of EFFORTS, from the least effort
BUDGET: Final = "thinking_budget"
VERBOSITY: Final = "verbosity"
# Words in a message that switch thoughts on and off, for templates that read them.
WORDS: Final = ("/think", "/no_think")
_NO_EFFORT: Final = ("none", "no_think")  # values of EFFORTS that switch thoughts off
_MOST_EFFORT: Final = "high"


def switched(template: ChatTemplate, *, on: bool, effort: str | None, tools: bool) -> dict[str, Any]:
    """Return the variables that switch thoughts on or off, and set their effort; empty if the template reads none.

    effort  effort if thoughts are on; None: the template's default, or _MOST_EFFORT if the effort is the only switch
    tools   whether the template for conversations with tools renders the prompt
    """
    found = {name: values[not on] for name, values in SWITCHES.items() if template.reads(name, tools=tools)}
    efforts = [name for name in EFFORTS if template.reads(name, tools=tools)]
    none = next((value for value in _NO_EFFORT if any(template.mentions(q + value + q) for q in "'\"")), None)
    if not on:
        effort = none
    elif effort is None and none is not None and not found:
        effort = _MOST_EFFORT  # the effort is the only switch, and may be off by default
    return found | (dict.fromkeys(efforts, effort) if effort is not None else {})


def levels(template: ChatTemplate, *, tools: bool) -> list[str]:
    """Return the efforts that a template accepts, from the least; see `ChatTemplate.accepts`."""
    return [
        level
        for level in LEVELS
        if template.accepts(switched(template, on=True, effort=level, tools=tools), tools=tools)
    ]


def nearest(template: ChatTemplate, effort: str, *, tools: bool) -> dict[str, Any]:
    """Return the variables that set an effort, or the nearest one that the template accepts; of two, the lesser."""
    wanted, known = LEVELS.index(effort), levels(template, tools=tools)
    found = min(known, key=lambda level: abs(LEVELS.index(level) - wanted), default=None)
    names = [name for name in EFFORTS if template.reads(name, tools=tools)]
    return {} if found is None else dict.fromkeys(names, found)


def switching_word(template: ChatTemplate, *, on: bool, tools: bool) -> str:
    """Return the word in a message that switches thoughts (Nemotron Nano 2); empty if the template reads none.

    Templates that read a variable too need no word.
    """
    known = all(any(template.mentions(f"{quote}{each}{quote} in ") for quote in "'\"") for each in WORDS)
    if not known or any(template.reads(name, tools=tools) for name in SWITCHES):
        return ""
    return WORDS[not on]


def with_word(messages: Sequence[Message], added: str) -> list[Message]:
    """Return the messages with a word at the end of the last one that a user sent; equal messages if there is none."""
    found = list(messages)
    for at in range(len(found) - 1, -1, -1):
        content = found[at].get("content")
        if found[at].get("role") == "user" and isinstance(content, (str, list)):
            more: Any = f" {added}" if isinstance(content, str) else [{"type": "text", "text": added}]
            found[at] = {**found[at], "content": content + more}
            break
    return found


def renamed(variables: Mapping[str, Any], template: ChatTemplate, *, tools: bool) -> dict[str, Any]:
    """Return a request's variables; a switch that the template does not read is replaced by the template's switches."""
    found: dict[str, Any] = {}
    for name, value in variables.items():
        values = SWITCHES.get(name)
        if values is None or template.reads(name, tools=tools) or value not in values:
            found[name] = value
        else:
            found = switched(template, on=value == values[0], effort=None, tools=tools) | found
    return found
