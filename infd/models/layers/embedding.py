"""Tokens in, logits out: the two ends of a decoder, which may share one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.parameter import Blueprint, Parameter


class Embedding:
    def __init__(self, blueprint: Blueprint, name: str, vocab_size: int, hidden_size: int) -> None:
        self._embedding = blueprint.ops.embedding
        self.weight = blueprint.declare({f"{name}.weight": vocab_size}, (hidden_size,))

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return [T, hidden] of tokens [T]."""
        return self._embedding(tokens, self.weight.tensor)


class Head:
    """Hidden states to logits. Given the embedding's weight it shares it; there is never a second copy."""

    def __init__(
        self, blueprint: Blueprint, name: str, vocab_size: int, hidden_size: int, *, tied: Parameter | None
    ) -> None:
        self._linear = blueprint.ops.linear
        self._weight = tied or blueprint.declare({f"{name}.weight": vocab_size}, (hidden_size,))

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [N, vocab] of hidden [N, hidden]."""
        return self._linear(hidden, self._weight.tensor, None).float()
