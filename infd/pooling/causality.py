"""Whether a decoder's tokens see those after them, as config.json says it; nothing here checks other keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

GRITLM: Final = "GritLM"  # the architecture's name
GRITLM_MODULE: Final = "modeling_gritlm"  # of its authors' code, in files whose architecture is Mistral's


def sees_ahead(config: Mapping[str, Any]) -> bool:
    """Return whether tokens see those after them, so that the model cannot generate."""
    tables = [config, config.get("text_config")]
    return any(
        table.get("is_causal") is False or table.get("use_bidirectional_attention") is True
        for table in tables
        if isinstance(table, dict)
    )


def is_gritlm(config: Mapping[str, Any]) -> bool:
    """Return whether the model is GritLM, which generates with causality and embeds without."""
    names, code = config.get("architectures"), config.get("auto_map")
    if isinstance(names, list) and names[:1] == [GRITLM]:
        return True
    places = code.values() if isinstance(code, dict) else ()
    return any(isinstance(place, str) and place.startswith(GRITLM_MODULE) for place in places)
