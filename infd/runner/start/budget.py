"""Compute the bytes available to the cache, and describe the memory budget for logs.

On a GPU infd may allocate a share of the memory that was free when infd started. After the weights are loaded, the
largest step is run, with the smallest cache that it needs, to measure its peak. The cache gets the bytes of the share
that weights and steps do not need. On a CPU the cache may occupy a share of the host's free memory.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.errors import OutOfMemory
from infd.rounding import ceil_div
from infd.runner.cuda_graphs.buffers import sizes
from infd.runner.faults import free_tensors, lacks_memory
from infd.runner.start.cache_size import Room
from infd.runner.start.calibration import LEAST, LIKELIEST
from infd.runner.start.trial import TrialPlans, run

if TYPE_CHECKING:
    from infd.runner.arenas.arena import Arena, Bank
    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.start.runners import Runners

MIB: Final = 2**20
# Largest share of the host memory free after loading; the remainder is for activations and other programs.
HOST_SHARE: Final = 0.6
GRAPH_BYTES: Final = 8 * MIB  # least estimate per CUDA graph: drivers allocate for several graphs at once


class Footprint(Struct, frozen=True):
    """The memory of steps in bytes, without weights and cache.

    tokens      number of tokens of the largest step that fits
    step        peak of the largest step
    decoding    peak of a step in which every row decodes
    persistent  allocated between steps too: rows, workspaces, kernels
    graph       allocated by CUDA for one graph, without the tensors in the graph's pool
    verifying   peak of a step in which every row verifies the most drafts; 0: none are drafted
    """

    tokens: int
    step: int
    decoding: int
    persistent: int
    graph: int
    verifying: int = 0

    @property
    def peak(self) -> int:
        """Return the peak of any step."""
        return max(self.step, self.decoding, self.verifying)


class Budget(Struct, frozen=True, kw_only=True):
    """A GPU's memory in bytes, by use.

    others   allocated when infd started, by other processes and by CUDA for this process
    share    fraction of the remaining memory, total - others, that infd may allocate
    graphs   estimate for CUDA graphs
    """

    total: int
    others: int
    share: float
    weights: int
    footprint: Footprint
    graphs: int

    @property
    def room(self) -> Room:
        """Return the bytes available to the cache."""
        allowed = int((self.total - self.others) * self.share)
        remaining = allowed - self.weights - self.footprint.persistent - self.footprint.peak - self.graphs
        return Room(max(0, remaining), f"{self.share:.0%} of the GPU, less weights and steps")

    def explain(self, cache: int) -> str:
        """Return the budget as lines of text. cache: bytes of the cache."""
        parts = [
            (self.others, "allocated before infd started, by other processes and by CUDA"),
            (self.weights, "weights"),
            (self.footprint.persistent, "rows, workspaces and kernels"),
            (self.footprint.peak, f"steps of at most {self.footprint.tokens:,} tokens"),
            (self.graphs, "CUDA graphs, estimated"),
            (cache, "cache"),
        ]
        unused = self.total - sum(size for size, _ in parts)
        limit = f"unused; infd may allocate {self.share:.0%} of the memory that was free at start"
        lines = [(self.total, "total"), *parts, (unused, limit)]
        return "\n".join(["the GPU's memory, in MiB:", *(f"{size / MIB:>11,.0f}  {use}" for size, use in lines)])


def on_host(bank: Bank) -> Room:
    """Return the bytes available to a cache in the host's memory."""
    free = bank.free()
    return Room(int(HOST_SHARE * free), f"{HOST_SHARE:.0%} of {free / MIB:,.0f} MiB free")


def draw_up(runners: Runners, bank: Bank, weights: Arena, *, most: int, graphs: Graphs | None) -> Budget:
    """Run the largest step that fits a GPU's memory, and return the budget.

    most    tokens of the largest allowed step; halved until a step fits
    graphs  captures the smallest step, to measure the memory of a graph; None: steps are not captured

    Raises OutOfMemory if no step fits.
    """
    config, tokens = runners.config, most
    while (footprint := _footprint(runners, bank, weights, tokens, graphs)) is None:
        if tokens <= LEAST:
            free = f"{bank.free() / MIB:,.0f} MiB are free"
            raise OutOfMemory(f"no memory for a step of {tokens} tokens beside the weights; {free}")
        tokens //= 2
    bank.trim()
    captures = config.device.graphs and runners.setup.model.generates
    captured = len(sizes(runners.rows)) * (2 if config.lora.modules or config.lora.root else 1)
    return Budget(
        total=bank.free() + bank.held(),
        others=bank.others,
        share=config.device.memory_utilization,
        weights=weights.size,
        footprint=footprint,
        # Twice, because tensors of decoding steps are allocated in the graphs' pool and in torch's own cache.
        graphs=2 * footprint.decoding + captured * max(footprint.graph, GRAPH_BYTES) if captures else 0,
    )


def _footprint(runners: Runners, bank: Bank, weights: Arena, tokens: int, graphs: Graphs | None) -> Footprint | None:
    """Measure a step of `tokens` tokens, or of fewer if the rows have no room; return None if memory runs out."""
    layout, rows, longest = runners.spec.layout, runners.rows, runners.setup.max_len
    length = min(longest - 1, tokens)
    prompts = ceil_div(tokens, length) * sum(ceil_div(length, group.page_tokens) for group in layout.groups)
    scheduling, setup = runners.config.scheduler, runners.setup
    drafts = setup.model.generates and scheduling.speculative != "off"
    most = scheduling.speculative_tokens if drafts else 0
    sampled = 1 + max(0, min(most, tokens // rows - 1, longest - 2))  # positions of a row
    pages = max(prompts, rows * sum(ceil_div(sampled, group.page_tokens) for group in layout.groups))
    cache = None
    try:
        runner, cache = runners.build(pages, longest, purpose="the cache of a first step", graphs=graphs)
        long = TrialPlans(layout, pages=pages, rows=rows, max_model_len=longest, task=setup.task)
        # A row of the first has one prompt token and one sampled token.
        wide, drafted = (
            TrialPlans(layout, pages=pages, rows=rows, max_model_len=n + 1, task=setup.task) for n in (1, sampled)
        )
        scored = LIKELIEST if setup.model.generates else None  # logits of scored tokens need memory
        plan = long.plan(min(tokens, long.room), scored)
        run(runner, plan)  # run once unmeasured: libraries allocate workspaces that stay allocated
        step = bank.peak(partial(run, runner, plan))
        decoding = bank.peak(partial(run, runner, wide.plan(rows)))
        verifying = bank.peak(partial(run, runner, drafted.verifying(rows * sampled))) if sampled > 1 else 0
        graph = bank.retained(runner.idle)
        bank.trim()
        # Measured while this runner exists, because the serving runner has as many rows, of this length or shorter.
        persistent = bank.held() - bank.others - weights.size - cache.size
        return Footprint(tokens, step, decoding, max(0, persistent), graph, verifying)
    except Exception as error:
        if not lacks_memory(error):
            raise
        free_tensors(error)
        return None
    finally:
        if cache is not None:
            cache.release()
