"""The small layers that follow pooling: sentence-transformers' dense layers, and heads for labels.

They compute in float32, a few rows at a time.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from infd.errors import CheckpointError
from infd.models.parameter import Source, View

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from infd.models.base import PassAdapters
    from infd.models.blueprint import Blueprint
    from infd.models.dimensions import Dimensions
    from infd.models.parameter import Matrix, Parameter
    from infd.pooling import Dense as DenseSettings
    from infd.request import PoolTask

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "none": lambda x: x,
        "tanh": torch.tanh,
        "gelu": F.gelu,
        "relu": F.relu,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
    }
)


# What precedes the names of tensors in heads for labels, in checkpoints that transformers writes.
LABEL_HEADS = ("classifier.", "pre_classifier.", "dense.", "head.", "score.")


class Dense:
    """activation(x W^T + bias), in float32."""

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        inputs: int,
        outputs: int,
        *,
        activation: str = "none",
        bias: bool = True,
    ) -> None:
        """Declare the layer `name`. Raises CheckpointError for an unknown activation."""
        if activation not in ACTIVATIONS:
            raise CheckpointError(f"{name}: activation {activation!r} is not computed")
        self._activation = ACTIVATIONS[activation]
        self._weight = blueprint.declare({f"{name}.weight": outputs}, (inputs,), dtype=torch.float32)
        self._bias = blueprint.declare({f"{name}.bias": outputs}, dtype=torch.float32) if bias else None
        self._target = blueprint.replaceable(name, outputs, inputs, bias=bias)

    def __call__(self, x: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        y = F.linear(x, self._weight.tensor, None if self._bias is None else self._bias.tensor)
        if adapters is not None:
            adapters.replace(y, x, self._target)
        return self._activation(y)


class Normed:
    """LayerNorm, in float32."""

    def __init__(self, blueprint: Blueprint, name: str, size: int, eps: float, *, bias: bool) -> None:
        self._weight = blueprint.declare({f"{name}.weight": size}, dtype=torch.float32)
        self._bias: Parameter | None = blueprint.declare({f"{name}.bias": size}, dtype=torch.float32) if bias else None
        self._eps = eps

    def __call__(self, x: Tensor, _: PassAdapters | None = None) -> Tensor:
        weight = self._weight.tensor
        return F.layer_norm(x, weight.shape, weight, None if self._bias is None else self._bias.tensor, self._eps)


class Layers:
    """Layers one after another. Implements base.PoolingHead."""

    def __init__(self, layers: Sequence[Dense | Normed]) -> None:
        self._layers = layers

    def __call__(self, vectors: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        vectors = vectors.float()
        for layer in self._layers:
            vectors = layer(vectors, adapters)
        return vectors


class TokenLogits:
    """The logits of a few tokens, in float32, as logits of labels; of two tokens, that of the second less the first's.

    Implements base.PoolingHead.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        dims: Dimensions,
        *,
        tied: Matrix | None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Declare the tokens' rows of the head `name`, unless they are the embedding's. Raises CheckpointError.

        The other arguments are those of layers.embedding.Head.
        """
        self._tokens, self._tied = blueprint.pooling.label_tokens, tied
        self._scale, self._softcap = scale, softcap
        if max(self._tokens) >= dims.vocab:
            raise CheckpointError(f"label tokens {[*self._tokens]}: the vocabulary has {dims.vocab} tokens")
        self._rows: Parameter | None = None
        if tied is None:
            weight, shape = f"{name}.weight", (dims.vocab, dims.hidden)
            if weight in blueprint.stored and blueprint.stored[weight].packed() is not None:
                raise CheckpointError(f"{weight} is quantized, so that rows for label tokens cannot be read alone")
            sources = tuple(
                Source(weight, shape, row * dims.hidden, View(token, dims.hidden))
                for row, token in enumerate(self._tokens)
            )
            self._rows = blueprint.fill((len(self._tokens) * dims.hidden,), torch.float32, sources)

    def __call__(self, vectors: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        if self._rows is not None:
            rows = self._rows.tensor.view(len(self._tokens), -1)
        else:
            assert self._tied is not None
            rows = self._tied.look_up(torch.tensor(self._tokens, device=vectors.device)).float()
        logits = F.linear(vectors.float(), rows) * self._scale
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits[:, 1:] - logits[:, :1] if len(self._tokens) == 2 else logits


def denses(blueprint: Blueprint) -> Layers | None:
    """Declare the dense layers of the checkpoint's modules.json; None if there are none."""
    layers = [declared(blueprint, each) for each in blueprint.pooling.denses]
    return Layers(layers) if layers else None


def pooling_layers(blueprint: Blueprint, hidden: int) -> Layers | None:
    """Declare the layers after pooling of a decoder: a head for labels, or dense layers; None: there are none."""
    if not blueprint.pooling.labels:
        return denses(blueprint)
    if "score.0.weight" in blueprint.stored:  # of Qwen2.5-Math's reward models
        first = Dense(blueprint, "score.0", hidden, hidden, activation="relu")
        return Layers([first, Dense(blueprint, "score.2", hidden, len(blueprint.pooling.labels))])
    bias = "score.bias" in blueprint.stored  # of each token's labels; a text's have none
    return Layers([Dense(blueprint, "score", hidden, len(blueprint.pooling.labels), bias=bias)])


def token_layers(blueprint: Blueprint) -> dict[PoolTask, Layers]:
    """Declare the layers that a checkpoint has for each token, by task."""
    pooling = blueprint.pooling
    layers: dict[PoolTask, Any] = {"token_embed": pooling.token_dense, "token_classify": pooling.token_weight}
    return {task: Layers([declared(blueprint, each)]) for task, each in layers.items() if each is not None}


def declared(blueprint: Blueprint, dense: DenseSettings) -> Dense:
    """Declare a dense layer."""
    return Dense(blueprint, dense.name, dense.inputs, dense.outputs, activation=dense.activation, bias=dense.bias)
