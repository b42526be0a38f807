"""Switch thoughts on or off, set their effort and announce their budget, through variables that a chat template reads.

Templates name these variables differently, and accept different values. The tables of this module list the names, and
the meaning of values; the template itself shows which variables it reads, and which values it accepts.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.chat import ChatTemplate

# Variable -> the values that switch thoughts on and off.
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
BUDGET: Final = "thinking_budget"
_NO_EFFORT: Final = ("none", "no_think")  # values of EFFORTS that switch thoughts off


def switched(template: ChatTemplate, *, on: bool, effort: str | None, tools: bool) -> dict[str, Any]:
    """Return the variables that switch thoughts on or off, and set their effort; empty if the template reads none.

    tools  whether the template for conversations with tools renders the prompt
    """
    found = {name: values[not on] for name, values in SWITCHES.items() if template.reads(name, tools=tools)}
    efforts = [name for name in EFFORTS if template.reads(name, tools=tools)]
    if on:
        return found | (dict.fromkeys(efforts, effort) if effort is not None else {})
    for value in _NO_EFFORT:
        if template.mentions(f"'{value}'") or template.mentions(f'"{value}"'):
            return found | dict.fromkeys(efforts, value)
    return found


def renamed(variables: Mapping[str, Any], template: ChatTemplate, *, tools: bool) -> dict[str, Any]:
    """Return a request's variables, with the template's own switch in place of a switch that the template lacks."""
    found: dict[str, Any] = {}
    for name, value in variables.items():
        values = SWITCHES.get(name)
        if values is None or template.reads(name, tools=tools) or value not in values:
            found[name] = value
        else:
            found = switched(template, on=value == values[0], effort=None, tools=tools) | found
    return found
