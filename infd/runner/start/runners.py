"""Build the runners of a model. There are three kinds.

1. the runner with a small cache on which `budget.py` measures the memory of steps
2. the serving runner
3. the runners of `infd warm`, whose tensors have no storage
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.runner.adapters import DeviceSlots
from infd.runner.arenas.cache import CacheSpec
from infd.runner.instance import Instance
from infd.runner.rows import Rows
from infd.runner.runner import Runner
from infd.runner.staging import staging

if TYPE_CHECKING:
    from infd.config import Config
    from infd.kernels.ops import Ops
    from infd.runner.arenas.arena import Arena, Arenas
    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.pulse import Pulse
    from infd.runner.start.setup import ModelSetup


class Runners:
    """Builds runners of one model.

    rows        number of rows of each runner
    spec        layout and tensors of each runner's cache, without the number of pages
    workspaces  the kernels' scratch memory, shared by all runners
    """

    def __init__(self, config: Config, setup: ModelSetup, arenas: Arenas, pulse: Pulse) -> None:
        self.config = config
        self.setup = setup
        self.pulse = pulse
        self.rows = config.scheduler.max_num_seqs
        page_tokens = config.cache.page_tokens
        self.spec = CacheSpec(setup.model.cache_layout(page_tokens), setup.model.page_tensors(page_tokens))
        self.workspaces = _workspaces(setup.ops, arenas)
        self._arenas = arenas

    def build(
        self, pages: int, max_len: int, *, purpose: str = "cache", graphs: Graphs | None = None
    ) -> tuple[Runner, Arena]:
        """Return a runner for sequences of at most `max_len` tokens, and the arena of its cache.

        pages    number of pages of the cache
        purpose  the purpose of the cache's arena, for the message of OutOfMemory
        graphs   captures decoding steps; None: no step is captured

        Raises OutOfMemory.
        """
        model, ops, device = self.setup.model, self.setup.ops, self.setup.device
        layout = self.spec.layout
        cache = self._arenas.arena(self.spec.arena_bytes(pages), purpose)
        rows = Rows(
            rows=self.rows,
            max_len=max_len,
            page_tokens=[group.page_tokens for group in layout.groups],
            vocab_size=model.vocab_size,
            staging=staging(device),
            kernels=ops.rows,
        )
        scales = {layer: each.tensor for layer, each in model.cache_scales.items()}
        instance = Instance(
            model,
            ops,
            layout,
            cache=self.spec.allocate(pages, cache, scales),
            rows=rows,
            adapters=DeviceSlots(
                ops.lora if model.targets else None, rows.staging, self.config.lora.max_adapters, targets=model.targets
            ),
            pulse=self.pulse,
            pooling=self.setup.pooling,
        )
        return Runner(instance, graphs), cache


def _workspaces(ops: Ops, arenas: Arenas) -> list[Arena]:
    """Allocate the kernels' workspaces. Raises OutOfMemory."""
    allocated = []
    for family in ops.workspaces:
        arena = arenas.arena(family.workspace_bytes, "kernel workspaces")
        memory = arena.take((family.workspace_bytes,), torch.uint8)
        family.work_in(memory.zero_())  # `Workspace` promises zeroed memory
        allocated.append(arena)
    return allocated
