"""Answers of every syntax of tool calls, one file per syntax or group; `test_tool_syntaxes.py` tests them all.

A file states `FAMILIES`, a dict of `Family` by the name of the syntax in the registry.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.text.syntaxes.family import Family


def families() -> dict[str, Family]:
    """Return the family of every syntax, by name."""
    found: dict[str, Family] = {}
    for module in iter_modules(__path__):
        for name, family in getattr(import_module(f"{__name__}.{module.name}"), "FAMILIES", {}).items():
            assert name not in found, name
            found[name] = family
    return found
