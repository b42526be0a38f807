"""Syntaxes of thoughts: a file per shape, a table entry per family.

"auto" selects the first syntax whose `matches` accepts the template, so the more specific syntaxes come first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from infd.text.reasoning import blocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.reasoning.base import ReasoningSyntax

SYNTAXES: Mapping[str, ReasoningSyntax] = MappingProxyType({**blocks.FAMILIES})
ALIASES: Mapping[str, str] = MappingProxyType({**blocks.ALIASES})  # names that other servers use
