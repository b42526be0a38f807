"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infd.models.config import Settings
from infd.models.llama import Llama

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.models.parameter import Blueprint


class Mistral(Llama):
    def __init__(self, config: Mapping[str, Any], blueprint: Blueprint) -> None:
        settings = Settings(config)
        super().__init__(
            config, blueprint, window=settings.integer("sliding_window") if "sliding_window" in settings else None
        )
