"""Mistral: Llama with an optional sliding window, the same in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.llama import Llama

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Mistral(Llama):
    """The decoder of MistralForCausalLM."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        window = settings.integer("sliding_window") if "sliding_window" in settings else None
        super().__init__(settings, blueprint, window=window)
