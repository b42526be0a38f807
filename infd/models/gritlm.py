"""GritLM: Mistral, whose embeddings are computed without causality and without windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.mistral import Mistral

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class GritLM(Mistral):
    """The decoder of GritLM, which also generates, as Mistral does."""

    def __init__(self, settings: Settings, blueprint: Blueprint) -> None:
        unbounded = settings.completed({}, {"sliding_window": None})
        super().__init__(settings if blueprint.pooling.causal else unbounded, blueprint)
