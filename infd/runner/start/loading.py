"""Build a runner from settings: the model without weights, its weights, cache, rows and step size, in this order.

Runs on the device thread. Importing this module imports torch.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec import Struct

from infd.adapters.reading import AdapterReader
from infd.errors import CheckpointError, ConfigError, OutOfMemory, RequestFailed
from infd.kernels.cpu import fill
from infd.kernels.families.attention import FLOAT8
from infd.kernels.flashinfer import modules
from infd.kernels.select import vocabulary_of
from infd.kernels.triton.presence import installed
from infd.models.config import architecture
from infd.runner.arenas.arena import CPU, Anonymous, Arena
from infd.runner.arenas.residence import Residence
from infd.runner.arenas.vram import bank_of
from infd.runner.cuda_graphs.capture import CudaGraphs
from infd.runner.start.budget import draw_up, on_host
from infd.runner.start.cache_size import size_cache
from infd.runner.start.calibration import LEAST, MOST, calibrate, choose_spin, holds
from infd.runner.start.kept import Kept
from infd.runner.start.resolve import candidates
from infd.runner.start.runners import Runners
from infd.runner.start.setup import choose_device, set_up
from infd.runner.start.trial import TrialPlans, warm_up
from infd.scheduler.layout import Capacity
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load, required_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infd.config import Config, DeviceConfig
    from infd.kernels.triton.compiled import Ledger
    from infd.runner.arenas.arena import Bank
    from infd.runner.arenas.host import Headstart
    from infd.runner.cuda_graphs.capture import Graphs
    from infd.runner.pulse import Pulse
    from infd.runner.runner import Runner
    from infd.runner.start.calibration import Calibration
    from infd.runner.start.setup import ModelSetup

log = logging.getLogger("infd.runner")

DEPTH = {"cpu": 1, "cuda": 2}


class Loaded(Struct, frozen=True):
    """A runner ready to serve.

    residence  the memory of weights and cache
    reader     reads adapters for this model; any thread may use it
    facts      facts for operators, see Executor.describe
    """

    runner: Runner
    capacity: Capacity
    depth: int
    residence: Residence
    reader: AdapterReader
    facts: dict[str, Any]

    def idle(self) -> bool:
        """Do a piece of the runner's idle work unless memory is released; return whether more is left."""
        return self.residence.memory.whole and self.runner.idle()


def build(
    config: Config,
    pulse: Pulse,
    progress: Callable[[int, int], None] | None = None,
    headstart: Headstart | None = None,
) -> Loaded:
    """Load the checkpoint in directory config.model.path, and build, measure and warm up its runner.

    progress   called with (bytes of weights read, bytes to read)
    headstart  host memory for the weights, being populated

    Raises StartError.
    """
    started = time.monotonic()
    device = choose_device(config.device.kind)
    threads = config.device.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    ledger = _keep_compiled(config.device, pulse) if device.type == "cuda" else None
    try:
        with Checkpoint(Path(config.model.path)) as checkpoint, torch.inference_mode():
            loaded = _build(config, checkpoint, device, pulse, progress, headstart)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise OutOfMemory(f"out of memory while loading {config.model.path} on {device}: {error}") from error
    loaded.facts.update(threads=threads, load_s=round(time.monotonic() - started, 3))
    if ledger is not None:
        loaded.facts["kernels"] = told = ledger.facts()
        log.info(
            "kernels: %d compiled in %.1f s, %d found compiled", told["compiled"], told["compile_s"], told["found"]
        )
    return loaded


def _keep_compiled(settings: DeviceConfig, pulse: Pulse) -> Ledger | None:
    """Make Triton and FlashInfer read and store a GPU's compiled kernels in `device.kernel_cache`."""
    if not installed():
        return None
    from infd.kernels.triton.compiled import keep

    directory = Path(settings.kernel_cache) if settings.kernel_cache else None
    if settings.flashinfer:
        modules.keep(directory)
    try:
        return keep(directory, pulse.beat)
    except OSError as error:
        raise ConfigError(f"device.kernel_cache: {directory}: {error.strerror}") from error


def _build(
    config: Config,
    checkpoint: Checkpoint,
    device: torch.device,
    pulse: Pulse,
    progress: Callable[[int, int], None] | None,
    headstart: Headstart | None,
) -> Loaded:
    bank = bank_of(device)  # first: memory allocated by the setup must not count as other processes'
    setup = set_up(config, checkpoint, device, device, candidates(config))
    required = required_bytes(setup.model)
    had = None if headstart is None else headstart.claim(0 if bank.dedicated else required)
    free = bank.free() + (0 if headstart is None else headstart.held)
    if required > free:
        needed = f"the weights need {required / 2**20:,.0f} MiB on {device}"
        raise OutOfMemory(f"{needed}, {free / 2**20:,.0f} MiB are free")
    if had is None or bank.dedicated:
        weights = bank.arena(required, "weights")
    else:
        weights = Arena(required, device, "weights", partial(Anonymous, mapping=had))

    def report(done: int, total: int) -> None:
        pulse.beat()
        if progress is not None:
            progress(done, total)

    load(setup.model, checkpoint, weights, report, fill.here())
    dtype, how = _name_of(setup.dtype), config.model.quantization
    made = {"none": dtype}  # unquantized weights are named by their dtype
    kept = made.get(how, how)
    of_vocabulary = vocabulary_of(how, config.model.quantize_vocabulary)
    vocabulary = "" if of_vocabulary == how else made.get(of_vocabulary, of_vocabulary)
    told = f"{kept}, vocabulary {vocabulary}" if vocabulary else kept
    log.info("weights: %.0f MiB of %s, computed in %s", required / 2**20, told, dtype)
    unused = [name for name in checkpoint.tensors if name.endswith("_scale") and name in setup.model.unread]
    if unused:
        log.info(
            "%d scales of the checkpoint, such as %s, are not used: queries are not quantized, and keys and values only"
            " with --kv-cache-dtype fp8",
            len(unused),
            unused[0],
        )
    try:
        loaded = assemble(config, setup, bank, weights, pulse, checkpoint.config)
    except RequestFailed as error:  # raised by the trial steps, which request nothing unusual
        raise CheckpointError(
            f"{checkpoint.directory}: the first step failed: {error}; the weights are damaged, or need another"
            f" model.dtype (--dtype) than {dtype}"
        ) from error
    loaded.residence.remember(checkpoint)
    loaded.facts.update(
        dtype=dtype,
        quantization=how,
        vocabulary=vocabulary,
        arch=architecture(checkpoint.config),
        ops=setup.ops.describe(),
    )
    return loaded


def assemble(
    config: Config,
    setup: ModelSetup,
    bank: Bank,
    weights: Arena,
    pulse: Pulse,
    described: Mapping[str, Any] | None = None,
) -> Loaded:
    """Allocate cache and rows for a model with loaded weights, run its first steps, and measure steps.

    described  config.json, part of the key of an earlier start's calibration; None: steps are measured
    """
    model, _, dtype, device, max_len = setup
    runners = Runners(config, setup, bank, pulse)
    layout, tensors, rows = runners.layout, runners.tensors, runners.rows
    largest = config.scheduler.step_tokens or MOST[device.type]
    graphs = graphs_of(device, config.device)
    budget = draw_up(runners, bank, weights, config, most=largest, graphs=graphs) if bank.dedicated else None
    if budget is not None and budget.footprint.tokens < largest:
        largest = budget.footprint.tokens
        log.warning("steps of more than %d tokens do not fit into the GPU's memory", largest)
    size = size_cache(
        layout,
        tensors,
        wanted=config.cache.bytes,
        room=on_host(bank) if budget is None else budget.room,
        rows=rows,
        max_model_len=max_len,
        step_tokens=largest,
    )
    of = _cached(tensors[0].dtype) if tensors else "nothing"
    log.info("cache: %s pages, %.0f MiB of %s (%s)", f"{size.pages:,}", size.bytes / 2**20, of, size.reason)
    if size.max_model_len < max_len:
        reason = "the cache has no room for a longer sequence; raise cache.bytes"
        log.warning("max_model_len lowered from %d to %d: %s", max_len, size.max_model_len, reason)
        max_len = size.max_model_len
    try:
        runner, cache = runners.build(size.pages, max_len, graphs=graphs)
    except OutOfMemory as error:
        raise OutOfMemory(f"{error}; lower cache.bytes (--kv-cache-bytes)") from error
    if budget is not None:
        log.info("%s", budget.explain(size.bytes))

    plans = TrialPlans(layout, pages=size.pages, rows=rows, max_model_len=max_len)
    warm_up(runner, plans, device.type)
    runner.begin()
    if spin := choose_spin(runner, plans):
        log.info("decoding steps are so short that their end is asked for, for up to %.0f us", spin * 1e6)
    kept = Kept.of(config, setup, described, rows=rows, tokens=min(plans.room, largest))
    measured = _calibrated(config, runner, plans, kept, device.type, rows=rows, most=largest, scores=layout.divisible)
    if not bank.dedicated:
        cache.release()  # free the pages that the trial steps wrote
        cache.restore()
    return Loaded(
        runner=runner,
        capacity=Capacity(
            layout=layout,
            pages=size.pages,
            rows=rows,
            step_tokens=measured.alone,
            mixed_tokens=measured.mixed,
            crowded_tokens=measured.crowded,
            max_model_len=max_len,
            vocab_size=model.vocab_size,
            score_cost=measured.score_cost,
        ),
        depth=config.device.depth or DEPTH[device.type],
        residence=Residence(model, bank, weights, cache, runners.workspaces, config.model.weights_root, pulse.beat),
        reader=AdapterReader(model.targets, dtype, lambda size: Arena(size, CPU, "an adapter")),
        facts={
            "device": _name(device),
            "torch": str(torch.__version__),
            "weights_bytes": weights.size,
            "cache_bytes": cache.size,
            "cache_dtype": of,
        },
    )


def _calibrated(
    config: Config,
    runner: Runner,
    plans: TrialPlans,
    kept: Kept | None,
    device: str,
    *,
    rows: int,
    most: int,
    scores: bool,
) -> Calibration:
    """Return an earlier start's calibration if it still holds; else measure and store a new one."""
    found = None if kept is None else kept.find()
    how = ""
    if kept is not None and found is not None and max(found.step_tokens) <= most and holds(found, runner, plans):
        measured, how = found, f", as measured by an earlier start; remove {kept.path} to have it measured again"
    else:
        measured = calibrate(runner, plans, config.scheduler, device, rows=rows, most=most, scores=scores)
        if kept is not None:
            kept.keep(measured)
    if config.scheduler.step_tokens is None or config.scheduler.step_tokens > LEAST:
        sizes = "step_tokens: %d, %d where streams wait for the step, %d where many prompts do so, too%s"
        log.info(sizes, *measured.step_tokens, how)
    return measured


def graphs_of(device: torch.device, settings: DeviceConfig) -> Graphs | None:
    """Return CudaGraphs if steps are captured on this device, else None."""
    return CudaGraphs(device) if device.type == "cuda" and settings.graphs else None


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cached(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the setting cache.dtype."""
    return "fp8" if dtype is FLOAT8 else _name_of(dtype)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return device.type
