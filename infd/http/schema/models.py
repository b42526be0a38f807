"""GET /v1/models."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelCard(Struct, kw_only=True):
    """A name that requests may send as `model`.

    root    for an adapter, its directory; else the model's first name
    parent  for an adapter, the model's first name; else null
    tasks   what requests may ask for: generate, embed, classify, token_embed, token_classify, score
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "infd"
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: list[str]


class ModelList(Struct, kw_only=True):
    """All models and adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
