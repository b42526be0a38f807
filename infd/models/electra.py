"""ELECTRA: BERT whose embeddings may be narrower than its layers, with RoBERTa's head and gelu."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.bert import Bert
from infd.models.heads import Dense, Layers

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Electra(Bert):
    """The encoder of ElectraModel, and the heads for labels."""

    ROOT = "electra."

    @staticmethod
    def width(settings: Settings, hidden: int) -> int:  # noqa: ARG004 -- a subclass reads it
        return settings.integer("embedding_size", 128)

    @staticmethod
    def head(blueprint: Blueprint, _: str, hidden: int, *, by_token: bool) -> Layers:
        labels = len(blueprint.pooling.labels)
        if by_token:
            return Layers([Dense(blueprint, "classifier", hidden, labels)])
        return Layers(
            [
                Dense(blueprint, "classifier.dense", hidden, hidden, activation="gelu"),
                Dense(blueprint, "classifier.out_proj", hidden, labels),
            ]
        )
