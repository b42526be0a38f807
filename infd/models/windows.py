"""Sliding windows of attention, by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.models.config import Settings

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(settings: Settings, usual: Sequence[str]) -> Sequence[str]:
    """Return each layer's type, FULL or SLIDING, from config.json; if absent, `usual`. Raises CheckpointError."""
    if "layer_types" not in settings:
        return usual
    types = settings.strings("layer_types")
    if len(types) != len(usual) or not set(types) <= {FULL, SLIDING}:
        raise settings.error("layer_types", f"{len(usual)} of {FULL}, {SLIDING}", types)
    return types


def windows(settings: Settings, types: Sequence[str]) -> list[int | None]:
    """Return each layer's window in tokens; None: full attention. Raises CheckpointError."""
    return [settings.integer("sliding_window") if kind == SLIDING else None for kind in types]


def from_some_layer_on(settings: Settings, layers: int) -> list[int | None]:
    """Return a Qwen model's windows by layer, in tokens; None: full attention. Raises CheckpointError.

    No layer has a window if `use_sliding_window` is false. Otherwise `layer_types` states which layers have one; if it
    is absent, layers from `max_window_layers` on have a window.
    """
    if not settings.boolean("use_sliding_window", False):
        return [None] * layers
    first = settings.integer("max_window_layers", 28, least=0)
    return windows(settings, layer_types(settings, [SLIDING if i >= first else FULL for i in range(layers)]))
