"""How models write calls of tools: one file per syntax.

Where nobody names one, the first is taken that reads back the call that the model's template writes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from infd.text.tools.hermes import Hermes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.tools.base import ToolSyntax

SYNTAXES: Mapping[str, ToolSyntax] = MappingProxyType({"hermes": Hermes()})
