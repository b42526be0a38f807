"""Put runners of one setup together: a first one with a small cache, to be measured, and the one that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.runner.adapters import DeviceSlots
from infd.runner.arenas.cache import allocate, arena_bytes
from infd.runner.rows import Rows
from infd.runner.runner import Runner

if TYPE_CHECKING:
    from infd.config import Config
    from infd.kernels.ops import Ops
    from infd.runner.arenas.arena import Arena, Bank
    from infd.runner.graphs import Graphs
    from infd.runner.pulse import Pulse
    from infd.runner.start.setup import ModelSetup


class Assembly:
    """What any runner of a setup is made of, beside its weights, which are there.

    workspaces  that its kernels compute in, whichever runner calls them
    """

    def __init__(self, config: Config, setup: ModelSetup, bank: Bank, pulse: Pulse) -> None:
        self.setup = setup
        self.bank = bank
        self.rows = config.scheduler.max_num_seqs
        page_tokens = config.cache.page_tokens
        self.layout = setup.model.cache_layout(page_tokens)
        self.tensors = setup.model.page_tensors(page_tokens)
        self.workspaces = _workspaces(setup.ops, bank)
        self._slots = config.lora.max_adapters
        self._pulse = pulse

    def runner(
        self, pages: int, max_len: int, *, purpose: str = "cache", graphs: Graphs | None = None
    ) -> tuple[Runner, Arena]:
        """Return a runner whose sequences have at most `max_len` tokens, and the arena of its cache.

        purpose  of the arena, for whoever reads that there is no memory for it

        Raises OutOfMemory.
        """
        model, ops, _, device, _ = self.setup
        cache = self.bank.arena(arena_bytes(self.layout, self.tensors, pages), purpose)
        rows = Rows(
            rows=self.rows,
            max_len=max_len,
            page_tokens=[group.page_tokens for group in self.layout.groups],
            vocab_size=model.vocab_size,
            device=device,
            kernels=ops.rows,
        )
        scales = {layer: each.tensor for layer, each in model.cache_scales.items()}
        runner = Runner(
            model,
            ops.attention,
            ops.draw,
            rows,
            self.layout,
            allocate(self.layout, self.tensors, pages, cache, scales),
            DeviceSlots(ops.lora, device, self._slots, rows.staging),
            self._pulse,
            graphs,
        )
        return runner, cache


def _workspaces(ops: Ops, bank: Bank) -> list[Arena]:
    """Give kernels the memory that they want to compute in. Raises OutOfMemory."""
    arenas = []
    for family in ops.workspaces:
        arena = bank.arena(family.workspace_bytes, "kernels to compute in")
        memory = arena.take((family.workspace_bytes,), torch.uint8)
        family.work_in(memory.zero_())  # not every bank's is zeros
        arenas.append(arena)
    return arenas
