"""Run a model without scheduler and runner: scattered cache pages initialized to NaN, batches assembled by span."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infd.kernels.families.attention import KeyValuePages, in_chunks
from infd.kernels.select import select
from infd.models import registry
from infd.models.base import Batch, SampledBatch
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
    """An arena without a size limit."""

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
    """Load a checkpoint; `changed` replaces settings of its config.json."""
    with Checkpoint(directory) as checkpoint:
        ops = ops or select(device, dtype)
        config, stored = {**checkpoint.config, **changed}, checkpoint.tensors
        model = registry.build(config, ops, dtype=dtype, device=device, max_len=MAX_LEN, stored=stored)
        load(model, checkpoint, Heap(device))
    return model


class DrivenSequence:
    """A sequence: tokens, number of computed tokens, page table by group, adapter slot, regime."""

    def __init__(self, tokens: Sequence[int], groups: int, slot: int = 0, regime: int = 0) -> None:
        self.slot = slot
        self.regime = regime
        self.tokens = list(tokens)
        self.computed = 0
        self.tables: list[list[int]] = [[] for _ in range(groups)]


class Driver:
    """The simplest equivalent of scheduler and runner."""

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
        least_rows: int = 0,
    ) -> None:
        self.model = model
        self.beat = beat
        self.adapters = adapters
        self._least_rows = max(least_rows, model.least_rows if adapters is None else 4)
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
                    .fill_(255)  # NaN, as a number or as a scale
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

    def start(self, tokens: Sequence[int], slot: int = 0, *, prompt: int | None = None) -> DrivenSequence:
        """Start a sequence. prompt: number of prompt tokens; None: all tokens."""
        regime = self.layout.regimes.of(len(tokens) if prompt is None else prompt, len(tokens))
        return DrivenSequence(tokens, len(self.layout.groups), slot, regime)

    def held(self, sequence: DrivenSequence, group: int) -> int:
        """Return the number of pages that a sequence holds in a group."""
        return sum(page != 0 for page in sequence.tables[group])

    def step(self, *spans: tuple[DrivenSequence, int], last: bool = False) -> list[Tensor]:
        """Compute the next `count` tokens of each sequence; return the logits of each span's tokens.

        last  return the logits of each span's last token only, through Batch.sampled
        """
        for sequence, count in spans:
            self._provide(sequence, count)
        counts = [count for _, count in spans]
        batch = self._batch([(sequence, sequence.computed, count) for sequence, count in spans])
        adapters = batch.adapters
        if last and self.model.skips_unsampled:
            batch.sampled = self._last(
                [(sequence, sequence.computed + count - 1, 1) for sequence, count in spans], counts
            )
            adapters, counts = batch.sampled.adapters, [1] * len(spans)
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward(batch), adapters)
        assert logits.dtype is self.model.logits_dtype
        for sequence, count in spans:
            sequence.computed += count
        return list(logits[: sum(counts)].float().cpu().split(counts))

    def _last(self, spans: Sequence[tuple[DrivenSequence, int, int]], counts: list[int]) -> SampledBatch:
        """Return the last tokens of all spans as sampled positions; `counts` are the spans' lengths."""
        alone = self._batch(spans)
        tokens = (np.cumsum(counts) - 1).tolist()
        padding = len(alone.tokens) - len(tokens)
        tokens += tokens[-1:] * padding
        group = max(range(len(self.layout.groups)), key=lambda i: max(self.layout.groups[i].layers))
        index = torch.tensor(tokens, device=self.device)
        return SampledBatch(index, alone.attention[group], alone.adapters, padding)

    def _batch(self, spans: Sequence[tuple[DrivenSequence, int, int]]) -> Batch:
        """Return the pass over `count` tokens of each sequence from `start`."""
        tokens = [at for sequence, start, count in spans for at in sequence.tokens[start : start + count]]
        shift, prompts = self.layout.regimes.outgrown, None
        positions = [
            at + (shift or 0) * sequence.regime
            for sequence, start, count in spans
            for at in range(start, start + count)
        ]
        padding = max(0, self._least_rows - len(tokens))
        batches = [
            attention_batch(
                [PagedSpan(start, count, sequence.tables[index]) for sequence, start, count in spans],
                page_tokens=self.page_tokens,
                window=group.window,
                padding=padding,
                device=self.device,
            )
            for index, group in enumerate(self.layout.groups)
        ]
        plans = [
            self.ops.attention.prepare(batch if group.chunk is None else in_chunks(batch, group.chunk))
            for batch, group in zip(batches, self.layout.groups, strict=True)
        ]
        if shift is None and any(sequence.regime for sequence, _, _ in spans):
            lengths = [sequence.regime for sequence, _, count in spans for _ in range(count)]
            prompts = torch.tensor(lengths + [0] * padding, device=self.device)
        slots = np.array([sequence.slot for sequence, _, count in spans for _ in range(count)] + [0] * padding)
        return Batch(
            tokens=torch.tensor(tokens + [0] * padding, device=self.device),
            positions=torch.tensor(positions + [0] * padding, device=self.device),
            attention=plans,
            cache=self._cache,
            beat=self.beat,
            adapters=None if self.adapters is None else self.adapters.adapted(slots),
            prompts=prompts,
        )

    def _provide(self, sequence: DrivenSequence, count: int) -> None:
        """Grant pages for the next tokens; free pages behind the window, after overwriting them with NaN."""
        for table, group in zip(sequence.tables, self.layout.groups, strict=True):
            needed = group.pages_needed(sequence.computed, sequence.computed + count)
            for index in range(min(needed.start, len(table))):
                if table[index]:
                    for pages in self._slots:
                        for cache in pages[:2]:
                            cache[table[index]].view(torch.uint8).fill_(255)
                    self._free.append(table[index])
                    table[index] = 0
            while len(table) < needed.stop:
                table.append(self._free.pop(0) if len(table) >= needed.start else 0)
