"""Syntaxes of tool calls: one file per syntax.

"auto" takes the first syntax that parses a call as the model's template writes it.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from infd.text.tools.hermes import Hermes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.tools.base import ToolSyntax

SYNTAXES: Mapping[str, ToolSyntax] = MappingProxyType({"hermes": Hermes()})
