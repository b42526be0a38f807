"""RoBERTa, XLM-RoBERTa and CamemBERT: BERT whose positions begin after the padding token's id, with another head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.models.bert import Bert
from infd.models.config import after_padding
from infd.models.heads import Dense, Layers

if TYPE_CHECKING:
    from infd.models.blueprint import Blueprint
    from infd.models.config import Settings


class Roberta(Bert):
    """The encoder of RobertaModel, and the heads for labels."""

    ROOT = "roberta."

    @staticmethod
    def first_position(settings: Settings) -> int:
        return after_padding(settings)

    @staticmethod
    def head(blueprint: Blueprint, _: str, hidden: int, *, by_token: bool) -> Layers:
        labels = len(blueprint.pooling.labels)
        if by_token:
            return Layers([Dense(blueprint, "classifier", hidden, labels)])
        return Layers(
            [
                Dense(blueprint, "classifier.dense", hidden, hidden, activation="tanh"),
                Dense(blueprint, "classifier.out_proj", hidden, labels),
            ]
        )
