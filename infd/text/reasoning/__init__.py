"""Syntaxes of thoughts: one file per syntax.

"auto" takes the first syntax whose `matches` accepts the template, so the more specific syntaxes come first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from infd.text.reasoning.qwen3 import Qwen3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.reasoning.base import ReasoningSyntax

SYNTAXES: Mapping[str, ReasoningSyntax] = MappingProxyType({"qwen3": Qwen3()})
ALIASES: Mapping[str, str] = MappingProxyType({})  # names of other servers
