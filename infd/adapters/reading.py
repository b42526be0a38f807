"""Read an adapter into host memory, in the form that kernels use.

Factor B is multiplied by the scale; the factors A of fused modules are stacked. The
config and the tensors' header are checked before memory is allocated. Reading may run
on any thread.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from msgspec import Struct

from infd.adapters.files import locate
from infd.adapters.fit import fit
from infd.adapters.peft import PeftConfig
from infd.errors import AdapterTooLarge, CheckpointError
from infd.kernels.families.adapters import LowRank, LowRankPart, Replacement
from infd.request import AdapterFacts
from infd.weights.checkpoint import TensorFile
from infd.weights.formats.plain import PlainReader
from infd.weights.load import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from infd.adapters.fit import Change, Fitted, Target
    from infd.weights.load import Arena
    from infd.weights.stored import StoredTensor


class _Part(NamedTuple):
    """A module of each expert: its first output in the target, and the rank with which it is kept."""

    output: int
    rank: int


class HostWeights(Struct, frozen=True, eq=False, weakref=True):
    """An adapter's weights in host memory."""

    facts: AdapterFacts
    changes: Mapping[Target, LowRank | Replacement]


class AdapterReader:
    """A reader of adapters for one model."""

    def __init__(self, targets: Sequence[Target], dtype: torch.dtype, arena: Callable[[int], Arena]) -> None:
        """`dtype` is the weights' type in memory; `arena` allocates one adapter's arena, given the size in bytes."""
        self._targets = targets
        self._dtype = dtype
        self._arena = arena

    def read(self, path: str, root: str | None, room: int) -> HostWeights:
        """Read the adapter in directory `path`.

        root  directory that must contain the adapter; see files.locate
        room  maximum bytes of host memory for the adapter

        Raises CheckpointError for an adapter that infd cannot compute, that does not match the model, or whose weights
        are not finite; AdapterTooLarge for an adapter above `room`.
        """
        if not self._targets:
            raise CheckpointError(
                "this model takes no adapters: it runs on transformers' code, and they need a model file of infd's own"
            )
        files = locate(path, root)
        stamp = files.stamp()
        config = PeftConfig.read(files.config)
        file = TensorFile(files.tensors)
        try:
            return self._read(config, fit(config, file, self._targets), room, stamp)
        finally:
            file.close()

    def _read(
        self,
        config: PeftConfig,
        fitted: Fitted,
        room: int,
        stamp: tuple[tuple[int, ...], ...],
    ) -> HostWeights:
        changes = fitted.changes
        shapes = [shape for target, each in changes.items() for shape in _shapes(target, each)]
        own = [tensor for each in fitted.own.values() for tensor in (each.weight, each.bias) if tensor is not None]
        # An upper bound: stacked factors share one alignment, but the sum counts an alignment for each factor.
        size = sum(prod(shape) * self._dtype.itemsize + ALIGNMENT for shape in shapes)
        size += sum(prod(tensor.shape) * torch.float32.itemsize + ALIGNMENT for tensor in own)
        if size > room:
            raise AdapterTooLarge(size, room)
        arena, reader = self._arena(size), PlainReader(lambda _: None)
        held: dict[Target, LowRank | Replacement] = {
            target: (self._stack_experts if target.experts else self._stack)(target, each, arena, reader)
            for target, each in changes.items()
        }
        for target, layer in fitted.own.items():
            assert layer.weight is not None
            bias = None if layer.bias is None else _whole(layer.bias, arena, reader)
            held[target] = Replacement(_whole(layer.weight, arena, reader), bias)
        rank = max(change.rank for each in changes.values() for change in each)
        return HostWeights(AdapterFacts(config.base_model_name_or_path or "", rank, size, stamp), held)

    def _stack(self, target: Target, changes: Sequence[Change], arena: Arena, reader: PlainReader) -> LowRank:
        ranks = sum(change.rank for change in changes)
        a = arena.take((target.inputs, ranks) if target.table else (ranks, target.inputs), self._dtype)
        parts, rank = [], 0
        for change in changes:
            if target.table:  # stored as [rank, rows]; transposed, so that the look-up of a token reads one row
                whole = torch.empty(change.a.shape, dtype=torch.float32)
                reader.read(change.a, whole)
                a[:, rank : rank + change.rank].copy_(whole.T)
            else:
                reader.read(change.a, a[rank : rank + change.rank])
            b = arena.take(change.b.shape, self._dtype)
            parts.append(LowRankPart(self._scaled(change, b, reader), rank, change.output))
            _require_finite(change.b, b)
            rank += change.rank
        if not _finite(a):
            columns = a.split_with_sizes([change.rank for change in changes], dim=1 if target.table else 0)
            for change, held in zip(changes, columns, strict=True):
                _require_finite(change.a, held)
        return LowRank(a, parts)

    def _stack_experts(self, target: Target, changes: Sequence[Change], arena: Arena, reader: PlainReader) -> LowRank:
        """Return the factors for all experts. Experts of lower rank, and those not changed, are padded with zeros."""
        ranks = {part.output: part.rank for part in _parts(changes)}
        firsts = dict(zip(ranks, accumulate(ranks.values(), initial=0), strict=False))
        a = arena.take((target.experts, sum(ranks.values()), target.inputs), self._dtype).zero_()
        outputs = _outputs(target, changes)
        kept = {
            output: arena.take((target.experts, outputs[output], rank), self._dtype).zero_()
            for output, rank in ranks.items()
        }
        for change in changes:
            exact_a, exact_b = (torch.empty(stored.shape, dtype=torch.float32) for stored in (change.a, change.b))
            reader.read(change.a, exact_a)
            reader.read(change.b, exact_b)
            exact_b.mul_(change.scale)
            b, first = kept[change.output], firsts[change.output]
            if change.expert is not None:
                a_part, b_part = a[change.expert, first : first + change.rank], b[change.expert, :, : change.rank]
            else:
                exact_a, exact_b = _by_expert(target, change, exact_a, exact_b)
                a_part, b_part = a[:, first : first + change.rank], b
            _require_finite(change.a, a_part.copy_(exact_a))
            _require_finite(change.b, b_part.copy_(exact_b))
        return LowRank(a, [LowRankPart(b, firsts[output], output) for output, b in kept.items()])

    def _scaled(self, change: Change, b: Tensor, reader: PlainReader) -> Tensor:
        exact = torch.empty(change.b.shape, dtype=torch.float32)
        reader.read(change.b, exact)
        return b.copy_(exact.mul_(change.scale))


def _whole(stored: StoredTensor, arena: Arena, reader: PlainReader) -> Tensor:
    held = arena.take(stored.shape, torch.float32)
    reader.read(stored, held)
    _require_finite(stored, held)
    return held


def _parts(changes: Sequence[Change]) -> list[_Part]:
    """Return the modules of an expert that are changed, with the largest of the experts' ranks, by ascending output."""
    ranks: dict[int, int] = {}
    for change in changes:
        ranks[change.output] = max(change.rank, ranks.get(change.output, 0))
    return [_Part(output, ranks[output]) for output in sorted(ranks)]


def _outputs(target: Target, changes: Sequence[Change]) -> dict[int, int]:
    """Return the number of outputs of an expert's modules, by their first output."""
    if changes[0].expert is None:
        return {0: sum(target.modules.values())}
    sizes = list(target.modules.values())
    return dict(zip(accumulate(sizes, initial=0), sizes, strict=False))


def _shapes(target: Target, changes: Sequence[Change]) -> Iterator[tuple[int, ...]]:
    """Yield the shapes in which the factors are kept."""
    if not target.experts:
        for change in changes:
            yield from (change.a.shape, change.b.shape)
        return
    outputs = _outputs(target, changes)
    for part in _parts(changes):
        yield target.experts, part.rank, target.inputs
        yield target.experts, outputs[part.output], part.rank


def _by_expert(target: Target, change: Change, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors [E, rank, inputs] and [E, outputs, rank] of a change of all experts; see Change."""
    first = a.view(target.experts, change.rank, -1)
    second = b.view(b.shape[0], change.rank, target.experts).permute(2, 0, 1)
    if change.turned:
        first, second = second.transpose(1, 2), first.transpose(1, 2)
    if target.alternating:
        second = torch.cat((second[:, 0::2], second[:, 1::2]), 1)
    return first, second


def _finite(values: Tensor) -> bool:
    """Return whether all values are finite. aminmax propagates NaN, and is 30 times as fast as isfinite().all()."""
    return all(bool(extreme.isfinite()) for extreme in values.aminmax())


def _require_finite(stored: StoredTensor, held: Tensor) -> None:
    if not _finite(held):
        kind = str(held.dtype).removeprefix("torch.")
        raise CheckpointError(
            f"{stored.file.path}: {stored.name}: holds NaN or infinity, or numbers too large for {kind}, in which the"
            " model computes; train or save the adapter again"
        )
