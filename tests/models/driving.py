"""Drive a model by hand: its cache in scattered pages full of NaN, its batches put together span by span."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infd.kernels.families.attention import KeyValuePages
from infd.kernels.select import select
from infd.models import registry
from infd.models.base import Batch, Wanted
from infd.runner.arenas.cache import scaled
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load
from tests.kernels.paging import CPU, PagedSpan, attention_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from infd.kernels.ops import Ops
    from infd.models.base import Model
    from infd.runner.adapters import DeviceSlots

MAX_LEN = 256
PAGES = 400


class Heap:
    """An arena without bounds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def load_model(
    directory: Path,
    *,
    ops: Ops | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    changed: Mapping[str, Any] = MappingProxyType({}),
) -> Model:
    """Load a checkpoint, with settings `changed` from what its config.json says."""
    with Checkpoint(directory) as checkpoint:
        ops = ops or select(device, dtype)
        config, stored = {**checkpoint.config, **changed}, checkpoint.tensors
        model = registry.build(config, ops, dtype=dtype, device=device, max_len=MAX_LEN, stored=stored)
        load(model, checkpoint, Heap(device))
    return model


class Told:
    """A sequence: its tokens, how many are computed, its table in each group, its adapter's slot, its regime."""

    def __init__(self, tokens: Sequence[int], groups: int, slot: int = 0, regime: int = 0) -> None:
        self.slot = slot
        self.regime = regime
        self.tokens = list(tokens)
        self.computed = 0
        self.tables: list[list[int]] = [[] for _ in range(groups)]


class Driver:
    """What scheduler and runner do, in the plainest way."""

    def __init__(
        self,
        model: Model,
        *,
        ops: Ops | None = None,
        page_tokens: int = 4,
        seed: int = 0,
        device: torch.device = CPU,
        adapters: DeviceSlots | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.beat = beat
        self.adapters = adapters
        self._least_rows = model.least_rows if adapters is None else 4
        self.device = device
        self.ops = ops or select(device, torch.float32)
        self.page_tokens = page_tokens
        self.layout = model.cache_layout(page_tokens)
        self._free = list(range(1, PAGES))
        random.Random(seed).shuffle(self._free)
        slots = [
            KeyValuePages(
                *(
                    torch.empty((PAGES, *tensor.shape), dtype=tensor.dtype, device=device)
                    .view(torch.uint8)
                    .fill_(255)  # NaN, or a scale that is
                    .view(tensor.dtype)
                    for tensor in model.page_tensors(page_tokens)
                )
            )
            for _ in range(max(len(group.layers) for group in self.layout.groups))
        ]
        by_layer = {
            layer: scaled(slots[i], scales.tensor if (scales := model.cache_scales.get(layer)) else None)
            for group in self.layout.groups
            for i, layer in enumerate(group.layers)
        }
        self._slots = slots
        self._cache = [by_layer[layer] for layer in sorted(by_layer)]

    def start(self, tokens: Sequence[int], slot: int = 0, *, prompt: int | None = None) -> Told:
        """prompt: how many of the tokens are one; without it, all."""
        regime = self.layout.regimes.of(len(tokens) if prompt is None else prompt, len(tokens))
        return Told(tokens, len(self.layout.groups), slot, regime)

    def held(self, told: Told, group: int) -> int:
        """Return how many pages a sequence holds in a group."""
        return sum(page != 0 for page in told.tables[group])

    def step(self, *spans: tuple[Told, int], last: bool = False) -> list[Tensor]:
        """Compute the next `count` tokens of each sequence; return the logits of each span's tokens.

        last  of each span's last token, wanting no other
        """
        for told, count in spans:
            self._provide(told, count)
        counts = [count for _, count in spans]
        batch = self._batch([(told, told.computed, count) for told, count in spans])
        adapters = batch.adapters
        if last and self.model.narrows:
            batch.wanted = self._last([(told, told.computed + count - 1, 1) for told, count in spans], counts)
            adapters, counts = batch.wanted.adapters, [1] * len(spans)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch), adapters)
        for told, count in spans:
            told.computed += count
        return list(logits[: sum(counts)].cpu().split(counts))

    def _last(self, spans: Sequence[tuple[Told, int, int]], counts: list[int]) -> Wanted:
        """Want the last token of each span, which is given as one of its own; `counts` are the spans' tokens."""
        alone = self._batch(spans)
        tokens = (np.cumsum(counts) - 1).tolist()
        tokens += tokens[-1:] * (len(alone.tokens) - len(tokens))
        group = max(range(len(self.layout.groups)), key=lambda i: max(self.layout.groups[i].layers))
        return Wanted(torch.tensor(tokens, device=self.device), alone.attention[group], alone.adapters)

    def _batch(self, spans: Sequence[tuple[Told, int, int]]) -> Batch:
        """Return the pass over `count` tokens of each sequence from `start`."""
        tokens = [at for told, start, count in spans for at in told.tokens[start : start + count]]
        shift, prompts = self.layout.regimes.outgrown, None
        positions = [
            at + (shift or 0) * told.regime for told, start, count in spans for at in range(start, start + count)
        ]
        padding = max(0, self._least_rows - len(tokens))
        plans = [
            self.ops.attention.prepare(
                attention_batch(
                    [PagedSpan(start, count, told.tables[index]) for told, start, count in spans],
                    page_tokens=self.page_tokens,
                    window=group.window,
                    padding=padding,
                    device=self.device,
                )
            )
            for index, group in enumerate(self.layout.groups)
        ]
        if shift is None and any(told.regime for told, _, _ in spans):
            lengths = [told.regime for told, _, count in spans for _ in range(count)]
            prompts = torch.tensor(lengths + [0] * padding, device=self.device)
        slots = np.array([told.slot for told, _, count in spans for _ in range(count)] + [0] * padding)
        return Batch(
            tokens=torch.tensor(tokens + [0] * padding, device=self.device),
            positions=torch.tensor(positions + [0] * padding, device=self.device),
            attention=plans,
            cache=self._cache,
            beat=self.beat,
            adapters=None if self.adapters is None else self.adapters.adapted(slots),
            prompts=prompts,
        )

    def _provide(self, told: Told, count: int) -> None:
        """Grant the pages that the next tokens need, and take back, spoilt, those that nothing can see any more."""
        for table, group in zip(told.tables, self.layout.groups, strict=True):
            needed = group.pages_needed(told.computed, told.computed + count)
            for index in range(min(needed.start, len(table))):
                if table[index]:
                    for pages in self._slots:
                        for cache in pages[:2]:
                            cache[table[index]].view(torch.uint8).fill_(255)
                    self._free.append(table[index])
                    table[index] = 0
            while len(table) < needed.stop:
                table.append(self._free.pop(0) if len(table) >= needed.start else 0)
