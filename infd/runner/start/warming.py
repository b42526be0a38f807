"""Compile every kernel that a model needs on a GPU before serving, on a machine with or without a GPU.

The runner's first steps are issued on tensors without storage. The kernels and their arguments equal those of serving,
and neither weights nor GPU memory are needed. The steps are also issued as captured steps, and with adapters of zeros,
because any adapter may be loaded later.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from infd.errors import ConfigError, DeviceMissing, UsageError
from infd.kernels.families.adapters import LowRank, LowRankPart
from infd.kernels.flashinfer import modules
from infd.kernels.flashinfer.presence import cannot_compile
from infd.kernels.select import CACHED, insisting, runs_anywhere
from infd.kernels.triton import presence
from infd.kernels.triton.presence import FLOAT8
from infd.request import Adapter
from infd.rounding import ceil_div
from infd.runner.arenas import host
from infd.runner.arenas.arena import Arena
from infd.runner.pulse import Pulse
from infd.runner.start.resolve import candidates
from infd.runner.start.runners import Runners
from infd.runner.start.setup import choose_device, set_up
from infd.runner.start.trial import LENGTHS, TrialPlans, first_steps
from infd.scheduler.plan import Load
from infd.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from triton.backends.compiler import GPUTarget

    from infd.config import Config
    from infd.kernels.select import Candidate
    from infd.kernels.triton.compiled import Entry, Ledger
    from infd.kernels.triton.tuning import Found
    from infd.models.parameter import Target
    from infd.runner.adapters import DeviceSlots
    from infd.scheduler.plan import StepPlan

GPU = torch.device("cuda")
NOWHERE = torch.device("meta")
RANKS = (16, 32, 64)  # ranks of adapters, one per step: a step with several ranks would call no other kernels


class Launched:
    """Implements `cuda_graphs.capture.Graphs` without capturing: a replay calls the work again."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


class Unstored:
    """Implements `runner.arenas.arena.Arenas` with meta tensors, which have shapes but no storage."""

    def arena(self, size: int, purpose: str) -> Arena:
        return Arena(size, NOWHERE, purpose)


class Warmed(Struct, frozen=True):
    """The result of `warm`.

    gpu      compute capability or name of the target GPU
    entries  the model's kernels, compiled or found in the cache
    tuned    the fastest tilings of attention and experts, by the shapes' names; empty if not measured
    """

    gpu: str
    entries: list[Entry]
    tuned: dict[str, Found[Any]] = {}


def warm(
    config: Config, target: str | None, notify: Callable[[Entry], object] = lambda _: None, *, tune: bool = False
) -> Warmed:
    """Compile the model's kernels for `target`, by default this machine's GPU, into `device.kernel_cache`.

    notify  called with each kernel after it is compiled, or found in the cache
    tune    also measure tilings of attention and experts on this machine's GPU, and store the fastest

    Raises StartError.
    """
    if not presence.installed():
        raise DeviceMissing(presence.ABSENT)
    from infd.kernels.triton import compiled

    if target is not None and tune:
        raise UsageError("--tune measures on this machine's GPU: omit --target")
    if target is not None:
        gpu = compiled.target(target)
    elif not torch.cuda.is_available():
        raise DeviceMissing("this machine has no GPU: name a target, as in --target sm_90a")
    elif reason := presence.why_not(GPU):
        raise DeviceMissing(reason)
    else:
        gpu = compiled.here()
    if (
        CACHED.get(config.cache.dtype) is CACHED["fp8"]
        and gpu.backend == "cuda"
        and gpu.arch < (least := 10 * FLOAT8[0] + FLOAT8[1])
    ):
        raise DeviceMissing(f"cache.dtype fp8 requires compute capability {least / 10}; sm_{gpu.arch} is older")
    directory = Path(config.device.kernel_cache) if config.device.kernel_cache else None
    try:
        ledger = compiled.keep(directory, notify)
    except OSError as error:
        raise ConfigError(f"device.kernel_cache: {directory}: {error.strerror}") from error
    ahead = config.device.flashinfer and gpu.backend == "cuda"
    here = None if target is not None else choose_device(config.device.kind if host.kind(config) == "cuda" else "cuda")
    with compiled.compiling(gpu, here), _modules(directory, gpu, ledger) if ahead else nullcontext():
        shapes = issue(config, flashinfer=ahead)
    tuned = {} if here is None or not tune else _tune(shapes, here)
    if tuned:
        with compiled.compiling(gpu, here):
            issue(config)
    return Warmed(compiled.name(gpu), ledger.entries, tuned)


def _tune(shapes: Mapping[str, Sequence[Any]], device: torch.device) -> dict[str, Found[Any]]:
    """Find the fastest tiling of each shape by measurement; store the tilings beside the kernels.

    shapes  by family, see `issue`
    """
    from infd.kernels.triton import blocks, tilings, tuning_attention, tuning_experts
    from infd.kernels.triton.tuning import on_device

    gpu = blocks.gpu(device)
    kinds: dict[str, tuple[tilings.Kind[Any], Callable[..., Found[Any]]]] = {
        "attention": (tilings.ATTENTION, tuning_attention.tune),
        "experts": (tilings.EXPERTS, tuning_experts.tune),
    }
    tuned: dict[str, Found[Any]] = {}
    for family, some in shapes.items():
        kind, tune = kinds[family]
        with torch.inference_mode():
            found = {shape.name: tune(shape, gpu, device, on_device) for shape in some}
        tilings.write(kind, tilings.directory(), gpu, {name: each.tiling for name, each in found.items()})
        tuned |= found
    return tuned


def _modules(directory: Path | None, gpu: GPUTarget, ledger: Ledger) -> AbstractContextManager[None]:
    """Return a context in which calls of FlashInfer's kernels compile their modules, and compute nothing."""
    if reason := cannot_compile():
        raise DeviceMissing(reason)
    capability = divmod(gpu.arch, 10)
    modules.keep(directory, capability)
    from infd.kernels.triton.compiled import Entry

    return modules.building(capability, lambda name, found, seconds: ledger.add(Entry(name, found, seconds)))


def issue(config: Config, *, flashinfer: bool = False) -> dict[str, Sequence[Any]]:
    """Issue a model's first steps, without and with adapters: a GPU's kernels are called on tensors without storage.

    flashinfer  whether FlashInfer's kernels are also compiled

    Returns the shapes for which Triton's kernels were called whose tilings can be measured, by family.
    """
    with Checkpoint(Path(config.model.path)) as checkpoint, torch.inference_mode():
        setup = set_up(config, checkpoint, GPU, NOWHERE, _unprobed(candidates(config), flashinfer))
        for parameter in setup.model.parameters:
            parameter.tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=NOWHERE)
        runners = Runners(config, setup, Unstored(), Pulse())
        layout, targets = runners.spec.layout, setup.model.targets
        pages = len(layout.groups) * ceil_div(max(LENGTHS), config.cache.page_tokens)
        plans = TrialPlans(layout, pages=pages, rows=runners.rows, max_model_len=setup.max_len, task=setup.task)
        for graphs in (None, Launched()) if config.device.graphs and setup.model.generates else (None,):
            runner, _ = runners.build(pages, setup.max_len, graphs=graphs)
            adapted = adapted_steps(plans, runner.adapters, targets, setup.dtype)
            for plan in (*first_steps(plans, GPU.type), *adapted):
                runner.sample(runner.forward(plan))
        used = {row.family: getattr(setup.ops, row.family) for row in setup.ops.selection}
        return {family: getattr(used.get(family), "shapes", []) for family in ("attention", "experts")}


def adapted_steps(
    plans: TrialPlans, slots: DeviceSlots, targets: Sequence[Target], dtype: torch.dtype
) -> Iterator[StepPlan]:
    """Plan the smallest step for each of RANKS, with an adapter that changes all targets and is stored in `slots`."""
    for rank in RANKS if targets else ():
        adapter, plan = Adapter("warm", rank), plans.plan(1)
        slots.hold(adapter, dict(_changes(targets, rank, dtype)))
        plan.joins[0].slot = 1
        plan.loads = [Load(1, adapter)]
        yield plan


def _changes(targets: Sequence[Target], rank: int, dtype: torch.dtype) -> Iterator[tuple[Target, LowRank]]:
    for target in (each for each in targets if not each.whole):
        outputs, stack = next(iter(target.modules.values())), (target.experts,) if target.experts else ()
        a = torch.zeros(*stack, *((target.inputs, rank) if target.table else (rank, target.inputs)), dtype=dtype)
        yield target, LowRank(a, [LowRankPart(torch.zeros(*stack, outputs, rank, dtype=dtype), 0, 0)])


def _unprobed(candidates: Mapping[str, Sequence[Candidate]], flashinfer: bool) -> Mapping[str, Sequence[Candidate]]:
    """Return the candidates: in families with Triton kernels only these, preceded by FlashInfer's if `flashinfer`.

    These candidates are not checked against this machine's GPU, because the target may be another GPU.
    """
    by_family = insisting("triton", candidates)
    if not flashinfer:
        return by_family
    return {
        family: [
            *(replace(each, lacks=runs_anywhere) for each in candidates[family] if each.called("flashinfer")),
            *some,
        ]
        for family, some in by_family.items()
    }
