"""Tokens in, logits out: the two ends of a decoder, which may share one weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from infd.models.base import Adapted
    from infd.models.parameter import Blueprint, Matrix


class Embedding:
    def __init__(
        self, blueprint: Blueprint, name: str, vocab_size: int, hidden_size: int, *, scale: float = 1.0
    ) -> None:
        self.weight = blueprint.matrix({f"{name}.weight": vocab_size}, hidden_size, blueprint.ops.vocabulary)
        self._target = blueprint.adaptable({name: hidden_size}, vocab_size, table=True)
        self._scale = scale

    def __call__(self, tokens: Tensor, adapters: Adapted | None) -> Tensor:
        """Return [T, hidden] of tokens [T]."""
        x = self.weight.look_up(tokens)
        if adapters is not None:
            adapters.add_rows(x, tokens, self._target)
        return x if self._scale == 1 else x * self._scale


class Head:
    """Hidden states to logits. Given the embedding's weight it shares it; there is never a second copy."""

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: Matrix | None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Declare the weight, if it is not `tied`. Logits are scaled, then bounded: softcap * tanh(logit / softcap)."""
        family = blueprint.ops.vocabulary
        self._weight = tied or blueprint.matrix({f"{name}.weight": vocab_size}, hidden_size, family)
        self._target = blueprint.adaptable({name: vocab_size}, hidden_size)
        self._scale, self._softcap = scale, softcap

    def __call__(self, hidden: Tensor, adapters: Adapted | None) -> Tensor:
        """Return float32 logits [N, vocab] of hidden [N, hidden]."""
        logits = self._weight.multiply(hidden, wide=True)
        if adapters is not None:
            adapters.add(logits, hidden, self._target)
        if self._scale != 1:
            logits.mul_(self._scale)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
