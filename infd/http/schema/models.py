"""GET /v1/models."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelCard(Struct, kw_only=True):
    """A name that requests may send as `model`.

    root    an adapter's directory; else the model's first name
    parent  the model's first name for an adapter
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "infd"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(Struct, kw_only=True):
    """All models and adapters."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
