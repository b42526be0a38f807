"""Declare the tensors of a transformers model as parameters, so that infd's loader fills them in infd's arena.

Checkpoints may use old names, and store one tensor for each expert where the module stores one tensor for all experts.
transformers has a table of these conversions. This module applies the table in reverse, so that each stored tensor is
read directly into its rows of the parameter.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from infd.errors import CheckpointError
from infd.models.parameter import Parameter, Source

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Iterator

    from infd.models.blueprint import Blueprint
    from infd.models.parameter import Matrix


class ModuleAttribute(NamedTuple):
    """The module that refers to a tensor, and the name of the attribute."""

    module: nn.Module
    attribute: str

    def put(self, tensor: torch.Tensor) -> None:
        """Set the attribute to `tensor`, as an nn.Parameter if the attribute is an nn.Parameter."""
        kept = nn.Parameter(tensor, requires_grad=False) if self.attribute in self.module._parameters else tensor
        setattr(self.module, self.attribute, kept)


class ModuleParameter(Parameter):
    """A parameter that is also set on transformers' modules once its storage is allocated.

    A tensor [experts, rows, ...] of the module is loaded as a parameter [experts * rows, ...].
    """

    __slots__ = ("_form", "_places", "_tensor")

    def __init__(self, places: list[ModuleAttribute], form: tuple[int, ...], loaded: Parameter) -> None:
        """Wrap `loaded`. Its tensor, viewed in the shape `form`, is set at all `places`."""
        super().__init__(loaded.shape, loaded.dtype, loaded.sources)
        self._places = places
        self._form = form

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    @tensor.setter
    def tensor(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        for place in self._places:
            place.put(tensor.view(self._form))


class Product(nn.Module):
    """Replaces an nn.Linear of transformers: the product is computed by a form of infd's.

    bias     of the replaced module
    weight   the replaced module's weight, on the meta device, for code that reads its dtype or its shape
    """

    def __init__(self, linear: nn.Linear, matrix: Matrix) -> None:
        super().__init__()
        self._linear = (linear,)  # in a tuple: as a submodule its parameters would be the model's
        self._matrix = matrix
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def bias(self) -> torch.Tensor | None:
        return self._linear[0].bias

    @property
    def weight(self) -> torch.Tensor:
        return self._linear[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        if x.is_meta:  # while the model is surveyed, weights are not loaded
            return x.new_empty(shape)
        return self._matrix.multiply(x.reshape(-1, self.in_features), self.bias).view(shape)


class IgnoredNames:
    """Checkpoint names to ignore: duplicates of tied tensors, and transformers' own ignore patterns."""

    def __init__(self, tied: Iterable[str], patterns: Iterable[str]) -> None:
        self._tied = frozenset(tied)
        self._patterns = [re.compile(pattern) for pattern in patterns]

    def __contains__(self, name: object) -> bool:
        return name in self._tied or any(pattern.search(str(name)) for pattern in self._patterns)


def declare(model: Any, blueprint: Blueprint, within: nn.Module | None = None) -> Container[str]:
    """Declare every tensor of `model` that checkpoints contain; return the further names that a checkpoint may contain.

    within  a submodule: only its tensors are declared; None: all

    The products of nn.Linear are infd's, so that weights are quantized as those of infd's own models. An nn.Linear that
    shares its weight, such as a tied head, or keeps float32 in a narrower model, stays as it is.

    Raises CheckpointError if a checkpoint stores a tensor in a form that cannot be read row by row.
    """
    checkpoint = _Names(model, blueprint.stored)
    tied: set[str] = set()
    products: dict[nn.Module, Product] = {}
    inside = None if within is None else set(within.modules())
    for names, places in _places(model):
        if inside is not None and not any(place.module in inside for place in places):
            tied.update(each for name in names for each in checkpoint.possible(name))
            continue
        kept = next(filter(checkpoint.holds, names), names[0])
        tied.update(each for name in names if name != kept for each in checkpoint.possible(name))
        form = getattr(*places[0])
        dtype = torch.float32 if _stays_float32(kept, model, blueprint.dtype) else form.dtype
        shape, sources = checkpoint.sources(kept, tuple(form.shape))
        linear = places[0].module
        alone = len(places) == len(sources) == 1 and dtype == blueprint.dtype
        if alone and type(linear) is nn.Linear and linear.weight is form:
            family = blueprint.ops.vocabulary if linear is model.get_output_embeddings() else blueprint.ops.linear
            products[linear] = Product(linear, blueprint.matrix({sources[0].name: shape[0]}, shape[1], family))
            continue
        blueprint.parameters.append(ModuleParameter(places, tuple(form.shape), Parameter(shape, dtype, sources)))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in products:
            model.set_submodule(name, products[module])
    return IgnoredNames(tied, model._keys_to_ignore_on_load_unexpected or ())


def _places(model: nn.Module) -> Iterator[tuple[list[str], list[ModuleAttribute]]]:
    """Yield each tensor's names and module attributes.

    A tied tensor has several names; the first is the name that checkpoints usually store.
    """
    names: dict[int, list[str]] = {}
    places: dict[int, list[ModuleAttribute]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, _, attribute = name.rpartition(".")
        names.setdefault(id(tensor), []).append(name)
        places.setdefault(id(tensor), []).append(ModuleAttribute(model.get_submodule(owner), attribute))
    yield from zip(names.values(), places.values(), strict=True)


def _stays_float32(name: str, model: Any, dtype: torch.dtype) -> bool:
    """Return whether transformers' lists require float32 for a tensor although the model's dtype is narrower."""
    kept = set(model._keep_in_fp32_modules_strict or ()) if dtype.itemsize < 4 else set()
    if dtype == torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    return any(f".{part}." in f".{name}." for part in kept)


class _Names:
    """The checkpoint names of a model's tensors, and how a checkpoint splits them."""

    def __init__(self, model: Any, stored: Collection[str]) -> None:
        """stored: the names in the checkpoint; empty: the usual names are assumed."""
        changes = get_model_conversion_mapping(model, add_legacy=False)
        self._joined = [change.reverse_transform() for change in changes if isinstance(change, WeightConverter)]
        self._renamed = [change.reverse_transform() for change in changes if not isinstance(change, WeightConverter)]
        self._renamed.reverse()
        self._stored = stored
        self._prefix = f"{model.base_model_prefix}."

    def possible(self, name: str) -> tuple[str, ...]:
        """Return the names that a tensor may have in a checkpoint, the usual name first.

        Some checkpoints use the current names. Checkpoints saved without the head lack the prefix of the base model;
        those saved with the head have it, though a model built without the head lacks it.
        """
        usual = name
        for change in self._renamed:
            usual = change.rename_source_key(usual)[0]
        with_head = () if name.startswith(self._prefix) else (f"{self._prefix}{usual}", f"{self._prefix}{name}")
        return usual, name, usual.removeprefix(self._prefix), name.removeprefix(self._prefix), *with_head

    def holds(self, name: str) -> bool:
        """Return whether the checkpoint stores the tensor under any of its possible names."""
        return any(each in self._stored for each in self.possible(name))

    def sources(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Source, ...]]:
        """Return the shape of the parameter for a tensor, and the checkpoint tensors that fill the parameter."""
        if not self.holds(name):
            for change in self._joined:
                pieces, matched = change.rename_source_key(name)
                if matched is not None:
                    return self._experts(pieces, change, shape)
        return shape, (Source(self._kept(name), shape),)

    def _kept(self, name: str) -> str:
        possible = self.possible(name)
        return next((each for each in possible if each in self._stored), possible[0])

    def _experts(self, pieces: str, change: Any, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Source, ...]]:
        """Return the shape and the sources of a tensor [experts, rows, ...].

        pieces  name of each expert's first piece, with * in place of the expert's index
        """
        patterns = change.target_patterns
        if not _stacks_experts(change.reverse_transform().operations) or len(shape) < 2 or shape[1] % len(patterns):
            raise CheckpointError(f"its checkpoints hold {pieces} in a form that infd does not read")
        experts, rows, *rest = shape
        height = rows // len(patterns)
        sources = [
            Source(
                self._kept(pieces.replace(patterns[0], pattern).replace("*", str(expert))),
                (height, *rest),
                expert * rows + index * height,
            )
            for expert in range(experts)
            for index, pattern in enumerate(patterns)
        ]
        return (experts * rows, *rest), tuple(sources)


def _stacks_experts(operations: Iterable[Any]) -> bool:
    """Return whether a conversion stacks experts, each the concatenation of its pieces' rows."""
    kinds = [(type(operation), operation.dim) for operation in operations if hasattr(operation, "dim")]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
