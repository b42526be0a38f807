"""The embeddings, and the output head, which may share the weight of the tokens' embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.recipe import EmbeddingsRecipe, EncoderTable, HeadRecipe, ProductRecipe, TableRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.matrices import Matrices
    from infd.models.base import PassAdapters
    from infd.models.blueprint import Blueprint
    from infd.models.dimensions import Dimensions
    from infd.models.encoder_dimensions import EncoderDimensions
    from infd.models.layers.linear import Linear
    from infd.models.layers.norm import LayerNorm
    from infd.models.parameter import Matrix


class Embedding:
    """Token embeddings, multiplied by a scale."""

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        dims: Dimensions | EncoderDimensions,
        *,
        scale: float = 1.0,
        family: Matrices | None = None,
    ) -> None:
        """family: of the weight's forms; None: those that a head can share."""
        self.weight = blueprint.matrix({f"{name}.weight": dims.vocab}, dims.hidden, family or blueprint.ops.vocabulary)
        self._target = blueprint.adaptable({name: dims.hidden}, dims.vocab, table=True)
        self._scale = scale

    def __call__(self, tokens: Tensor, adapters: PassAdapters | None) -> Tensor:
        """Return embeddings [T, hidden] of tokens [T] int64."""
        x = self.weight.look_up(tokens)
        if adapters is not None:
            adapters.add_rows(x, tokens, self._target)
        return x if self._scale == 1 else x * self._scale

    def recipe(self) -> TableRecipe:
        return TableRecipe(self.weight.form, self.weight.tensor, self._scale)

    def table(self) -> Tensor | None:
        """Return the embeddings of all tokens, [vocab, hidden], if they are stored so."""
        return self.weight.rows(0, self.weight.form.shape[0]) if self._scale == 1 else None


class EncoderEmbedding:
    """The sum of embeddings of tokens, positions and token types, normed."""

    def __init__(
        self,
        blueprint: Blueprint,
        tokens: str,
        dims: EncoderDimensions,
        norm: LayerNorm | None,
        *,
        positions: str = "",
        first_position: int = 0,
        types: str = "",
        project: Linear | None = None,
    ) -> None:
        """Declare the tables: `tokens`, and, unless their name is empty, `positions` and `types`.

        first_position  the row of a text's first token in the table of positions
        project         the projection of the embeddings to the width of the layers; None: they have this width
        """
        self._tokens = Embedding(blueprint, tokens, dims, family=blueprint.ops.table)
        self._positions = (
            blueprint.declare({f"{positions}.weight": dims.positions}, (dims.hidden,)) if positions else None
        )
        self._types = blueprint.declare({f"{types}.weight": dims.types}, (dims.hidden,)) if types else None
        self._first, self._norm, self._project = first_position, norm, project
        self._typed = self._types is not None and self._types.shape[0] > 1  # RoBERTa: both texts of a pair have type 0

    def __call__(
        self, tokens: Tensor, positions: Tensor, types: Tensor | None, adapters: PassAdapters | None
    ) -> Tensor:
        """Return embeddings [T, hidden]; tokens, positions, types [T] int64. types: None: all 0."""
        x = self._tokens(tokens, adapters)
        if self._types is not None:
            x = x + self._types.tensor[0 if types is None or not self._typed else types]
        if self._positions is not None:
            x = x + self._positions.tensor[positions + self._first]
        x = x if self._norm is None else self._norm(x)
        return x if self._project is None else self._project(x, adapters)

    def recipe(self) -> EmbeddingsRecipe | None:
        """Return the embeddings as a recipe; None if they are projected, or stored in another form than as rows."""
        if self._project is not None or (words := self._tokens.table()) is None:
            return None
        tables = [EncoderTable(words, "tokens")]
        if self._types is not None:
            tables.append(EncoderTable(self._types.tensor, "types" if self._typed else "none"))
        if self._positions is not None:
            tables.append(EncoderTable(self._positions.tensor[self._first :], "positions"))
        return EmbeddingsRecipe(tuple(tables), None if self._norm is None else self._norm.recipe())


class Head:
    """The projection of hidden states to logits."""

    def __init__(
        self,
        blueprint: Blueprint,
        name: str,
        dims: Dimensions,
        *,
        tied: Matrix | None,
        scale: float = 1.0,
        softcap: float | None = None,
        bias: bool = False,
    ) -> None:
        """Declare the weight, or share the embedding's weight without a copy, and the bias if there is one.

        tied     the embedding's weight to share; None: the head has its own weight
        scale    multiplies the logits
        softcap  bounds the scaled logits: softcap * tanh(logit / softcap)
        """
        family = blueprint.ops.vocabulary
        self._weight = tied or blueprint.matrix({f"{name}.weight": dims.vocab}, dims.hidden, family)
        self._bias = blueprint.declare({f"{name}.bias": dims.vocab}) if bias else None
        self._target = blueprint.adaptable({name: dims.vocab}, dims.hidden)
        self._scale, self._softcap = scale, softcap
        # In a narrower dtype, rounding could make the largest of the scaled or capped logits equal.
        changed = scale != 1 or softcap is not None
        self.dtype = torch.float32 if changed else self._weight.form.wide

    def recipe(self) -> HeadRecipe | None:
        """Return the head as a recipe, or None if it bounds the logits: its tanh is torch's."""
        if self._softcap is not None:
            return None
        bias = None if self._bias is None else self._bias.tensor
        product = ProductRecipe(self._weight.form, self._weight.tensor, bias, self._weight.rounding)
        return HeadRecipe(product, self._scale)

    def __call__(self, hidden: Tensor, adapters: PassAdapters | None) -> Tensor:
        """Return the logits [N, vocab], in `self.dtype`, of hidden states [N, hidden]."""
        bias = None if self._bias is None else self._bias.tensor
        logits = self._weight.multiply(hidden, bias, wide=True).to(self.dtype)
        if adapters is not None:
            adapters.add(logits, hidden, self._target)
        if self._scale != 1:
            logits.mul_(self._scale)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
