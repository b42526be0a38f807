"""How models mark what they think: one file per syntax.

Where nobody names one, the first that fits is taken: the more particular come first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from infd.text.reasoning.qwen3 import Qwen3

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.text.reasoning.base import ReasoningSyntax

SYNTAXES: Mapping[str, ReasoningSyntax] = MappingProxyType({"qwen3": Qwen3()})
