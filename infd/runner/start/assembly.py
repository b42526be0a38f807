"""Assemble a runner for a model with loaded weights.

1. propose  chooses the cache's size and the largest step; on a GPU, after measuring the memory of steps
2. settle   builds the serving runner with these sizes
3. warm     runs the first steps, captures decoding steps, and decides whether the host polls for the end of steps
`assemble` then measures the duration of steps, or reads a calibration that an earlier start stored.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from infd.adapters.reading import AdapterReader
from infd.errors import OutOfMemory
from infd.kernels.families.attention import FLOAT8
from infd.runner.arenas.arena import CPU, Arena
from infd.runner.arenas.residence import ModelArenas, Residence
from infd.runner.cuda_graphs.capture import CudaGraphs
from infd.runner.start.budget import draw_up, on_host
from infd.runner.start.cache_size import size_cache
from infd.runner.start.calibration import LEAST, MOST, calibrate, choose_spin, still_valid
from infd.runner.start.calibration_file import CalibrationFile
from infd.runner.start.trial import TrialPlans, TrialRunner
from infd.scheduler.layout import Capacity

if TYPE_CHECKING:
    from infd.config import DeviceConfig, SchedulerConfig
    from infd.runner.arenas.arena import Bank
    from infd.runner.arenas.weights_source import WeightsSource
    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.runner import Runner
    from infd.runner.start.budget import Budget
    from infd.runner.start.cache_size import CacheSize
    from infd.runner.start.calibration import Calibration
    from infd.runner.start.runners import Runners

log = logging.getLogger("infd.runner")

DEPTH = {"cpu": 1, "cuda": 2}
DECODING_DEPTH = 2
# What is logged of Calibration.step_tokens, by whether the model generates.
_SIZES = {
    True: "step_tokens: %d, %d in steps that also decode, %d if many prompts wait%s",
    False: "step_tokens: %d%.0s%.0s%s",
}


class Loaded(Struct, frozen=True):
    """A runner ready to serve.

    depth, decoding_depth  see Executor
    residence              the memory of weights and cache
    reader                 reads adapters for this model, on any thread
    facts                  for operators, see Executor.describe
    """

    runner: Runner
    capacity: Capacity
    depth: int
    decoding_depth: int
    residence: Residence
    reader: AdapterReader
    facts: dict[str, Any]

    def idle(self) -> bool:
        """Do a piece of idle work, and return whether work remains. Does nothing while memory is released."""
        return self.residence.memory.whole and self.runner.idle()


class Proposal(Struct, frozen=True):
    """The sizes of the largest step and of the cache that the device's memory permits.

    step_tokens  most tokens of a step
    budget       the use of a GPU's memory; None on a CPU
    """

    step_tokens: int
    cache: CacheSize
    budget: Budget | None


def assemble(runners: Runners, bank: Bank, weights: Arena, source: WeightsSource) -> Loaded:
    """Allocate cache and rows for a model with loaded weights, run the first steps, and measure the duration of steps.

    If an earlier start has stored a calibration that is still valid, the calibration is used instead of measurements.

    Raises OutOfMemory, and RequestFailed if a step's results are not finite.
    """
    config, setup = runners.config, runners.setup
    kind = setup.device.type
    graphs = graphs_of(setup.device, config.device) if setup.model.generates else None
    proposal = propose(runners, bank, weights, graphs)
    trial, cache = settle(runners, proposal, graphs)
    warm(trial)
    most = proposal.step_tokens
    file = CalibrationFile.of(config, setup, source.config, rows=runners.rows, tokens=min(trial.plans.room, most))
    calibration = _calibrated(trial, config.scheduler, file, most)
    if not bank.dedicated:
        cache.release()  # frees the memory to which the trial steps wrote
        cache.restore()
    arenas = ModelArenas(weights, cache, runners.workspaces)
    alone, mixed, longest = calibration.alone, calibration.mixed, proposal.cache.max_model_len
    if not runners.spec.layout.divisible:  # the longest prompt is one span; of shorter ones a step has fewer tokens
        alone, mixed = max(alone, longest), min(alone, config.scheduler.step_tokens or alone)
    return Loaded(
        runner=trial.runner,
        capacity=Capacity(
            layout=runners.spec.layout,
            pages=proposal.cache.pages,
            rows=runners.rows,
            step_tokens=alone,
            mixed_tokens=mixed,
            crowded_tokens=calibration.crowded,
            max_model_len=longest,
            vocab_size=setup.model.vocab_size,
            score_cost=calibration.score_cost,
            row_costs=calibration.row_costs,
            generates=setup.model.generates,
            pools=setup.pooling.tasks,
            pools_last=setup.pooling.pooling == "lasttoken",
            experts=setup.model.experts,
        ),
        depth=config.device.depth or DEPTH[kind],
        decoding_depth=config.device.depth or DECODING_DEPTH,
        residence=Residence(setup.model, bank, arenas, source, runners.pulse.beat),
        reader=AdapterReader(setup.model.targets, setup.dtype, lambda size: Arena(size, CPU, "an adapter")),
        facts={
            "device": _name(setup.device),
            "torch": str(torch.__version__),
            "weights_bytes": weights.size,
            "cache_bytes": cache.size,
            "cache_dtype": _cache_dtype(runners),
        },
    )


def propose(runners: Runners, bank: Bank, weights: Arena, graphs: Graphs | None) -> Proposal:
    """Choose the largest step and the cache's size, so that both fit the device's memory. Raises OutOfMemory."""
    config, setup = runners.config, runners.setup
    most = config.scheduler.step_tokens or MOST[setup.device.type]
    if not runners.spec.layout.divisible:
        most = max(most, setup.max_len)
    budget = draw_up(runners, bank, weights, most=most, graphs=graphs) if bank.dedicated else None
    step_tokens = most if budget is None else budget.footprint.tokens
    if step_tokens < most:
        log.warning("steps of more than %d tokens do not fit into the GPU's memory", step_tokens)
    size = size_cache(
        runners.spec,
        configured=config.cache.bytes,
        room=on_host(bank) if budget is None else budget.room,
        rows=runners.rows,
        max_model_len=setup.max_len,
        step_tokens=step_tokens,
    )
    dtype = _cache_dtype(runners)
    log.info("cache: %s pages, %.0f MiB of %s (%s)", f"{size.pages:,}", size.bytes / 2**20, dtype, size.reason)
    if size.max_model_len < setup.max_len:
        reason = "the cache has no room for a longer sequence; raise cache.bytes"
        if not runners.spec.layout.divisible:
            reason = "a prompt is computed in one step, and a larger step does not fit into the GPU's memory"
        log.warning("max_model_len lowered from %d to %d: %s", setup.max_len, size.max_model_len, reason)
    return Proposal(step_tokens, size, budget)


def settle(runners: Runners, proposal: Proposal, graphs: Graphs | None) -> tuple[TrialRunner, Arena]:
    """Build the serving runner with the sizes of `proposal`, and log a GPU's memory budget.

    Returns the runner, which has computed no step yet, and the arena of its cache. Raises OutOfMemory.
    """
    pages, max_len = proposal.cache.pages, proposal.cache.max_model_len
    try:
        runner, cache = runners.build(pages, max_len, graphs=graphs)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}; lower cache.bytes (--kv-cache-bytes)") from error
    if proposal.budget is not None:
        log.info("%s", proposal.budget.explain(proposal.cache.bytes))
    layout, task = runners.spec.layout, runners.setup.task
    plans = TrialPlans(layout, pages=pages, rows=runners.rows, max_model_len=max_len, task=task)
    return TrialRunner(runner, plans), cache


def warm(trial: TrialRunner) -> None:
    """Run the first steps, capture decoding steps, and choose whether the host polls for the end of short steps."""
    trial.warm_up()
    trial.runner.begin()
    if spin := choose_spin(trial):
        log.info("decoding steps are short: the host polls for their end, for at most %.0f us a step", spin * 1e6)


def _calibrated(trial: TrialRunner, settings: SchedulerConfig, file: CalibrationFile | None, most: int) -> Calibration:
    """Return the calibration stored by an earlier start if it is still valid; else measure and store a calibration.

    A calibration that other processes disturbed is measured again by the next start, once: where a limit on CPU time
    slows every start, later starts need not measure.

    most  tokens of the largest step
    """
    stored = None if file is None else file.find()
    source, again = "", stored is not None and stored.disturbed
    usable = stored is not None and not again and max(stored.step_tokens) <= most
    if file is not None and stored is not None and usable and still_valid(stored, trial):
        calibration, source = stored, f", measured by an earlier start; remove {file.path} to measure again"
    else:
        calibration = calibrate(trial, settings, most)
        if again:
            calibration = replace(calibration, disturbed=False)
        elif calibration.disturbed:
            source = ", measured while other processes used the cores; the next start measures again"
        if file is not None:
            file.store(calibration)
    if settings.step_tokens is None or settings.step_tokens > LEAST:
        log.info(_SIZES[trial.generates], *calibration.step_tokens, source)
    return calibration


def graphs_of(device: torch.device, settings: DeviceConfig) -> Graphs | None:
    """Return CudaGraphs if steps are captured on this device, else None."""
    return CudaGraphs(device) if device.type == "cuda" and settings.graphs else None


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def _cache_dtype(runners: Runners) -> str:
    """Return the cache's dtype as a value of the setting cache.dtype."""
    tensors = runners.spec.tensors
    if not tensors:
        return "nothing"
    return "fp8" if tensors[0].dtype is FLOAT8 else dtype_name(tensors[0].dtype)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return device.type
