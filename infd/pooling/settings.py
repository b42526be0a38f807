"""The settings that `read` returns."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  # msgspec reads the annotations
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from infd.request import PoolTask, embeds

# How the hidden states of a prompt become one vector, in the words of sentence-transformers' `pooling_mode`:
# cls           that of the first token
# lasttoken     that of the last token
# mean          their mean
# max           the largest of each element
# mean_sqrt_len_tokens  their sum, divided by the square root of their number
# weightedmean  their mean, weighted by position, from 1 on
Reduction = Literal["cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"]
Activation = Literal["softmax", "sigmoid", "relu", "none"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
DenseActivation = Literal["none", "tanh", "gelu", "relu", "sigmoid", "silu"]


class Dense(Struct, frozen=True, kw_only=True):
    """A linear layer, with an activation, between pooling and normalization.

    name  of its tensors among those of the checkpoint, without .weight and .bias
    """

    name: str
    inputs: int
    outputs: int
    bias: bool
    activation: DenseActivation


class PoolingSettings(Struct, frozen=True, kw_only=True):
    """How a checkpoint's hidden states are reduced.

    tasks           what the checkpoint can be asked for; empty: it only generates
    causal          whether a token of a decoder sees only tokens before it; no encoder reads this
    include_prompt  whether pooling reads the tokens of the prompt that is named or the default
    text_mark       pooling leaves out a prompt's tokens up to the end of this text, an instruction; empty: none
    normalize       whether an embedding is divided by its Euclidean norm
    denses          layers that follow pooling, in order
    token_dense     layer that makes embeddings of tokens, except the one that begins a text; None: none
    token_weight    layer that makes weights of tokens, except those that begin and end texts; None: none
    dimensions      elements of an embedding
    matryoshka      the numbers of leading elements for which the model was trained; empty: the checkpoint names none
    labels          of classification, by index
    label_tokens    ids of the tokens whose logits after the prompt are those of the labels, for a model without a head
                    for labels. Two: the only label's logit is that of the second less that of the first
    step_token      id of the token that ends a step of an answer: only such tokens have labels; None: all tokens have
    activation      from logits of labels to their scores
    pairs           whether the model has one label, so that it scores pairs of texts
    prompts         texts before the input's, by name
    default_prompt  name of the prompt of requests that name none; None: no prompt
    similarity      with which the model's embeddings are compared
    max_tokens      to which inputs are truncated; None: the checkpoint states none
    lower_case      whether texts are converted to lower case before the tokenizer sees them
    """

    tasks: tuple[PoolTask, ...] = ()
    causal: bool = True
    pooling: Reduction = "mean"
    include_prompt: bool = True
    text_mark: str = ""
    normalize: bool = False
    denses: tuple[Dense, ...] = ()
    token_dense: Dense | None = None
    token_weight: Dense | None = None
    dimensions: int = 0
    matryoshka: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    label_tokens: tuple[int, ...] = ()
    step_token: int | None = None
    activation: Activation = "none"
    pairs: bool = False
    prompts: Mapping[str, str] = MappingProxyType({})
    default_prompt: str | None = None
    similarity: Similarity = "cosine"
    max_tokens: int | None = None
    lower_case: bool = False

    def width(self, task: PoolTask) -> int:
        """Return the numbers of a row; of embeddings, those that a request may cut."""
        if task == "token_embed" and self.token_dense is not None:
            return self.token_dense.outputs
        return self.dimensions if embeds(task) else max(1, len(self.labels))
