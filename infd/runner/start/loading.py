"""Load the configured model: build it without weights, read its weights, and assemble its runner.

Runs on the device thread. Importing this module imports torch.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infd.errors import CheckpointError, ConfigError, OutOfMemory, RequestFailed
from infd.kernels.cpu import fill, library
from infd.kernels.flashinfer import modules
from infd.kernels.select import vocabulary_of
from infd.kernels.triton.presence import installed
from infd.models.config import architecture, stored_dtype
from infd.models.heads import LABEL_HEADS
from infd.runner.arenas.arena import Anonymous, Arena
from infd.runner.arenas.vram import bank_of
from infd.runner.arenas.weights_source import WeightsSource
from infd.runner.start.assembly import assemble, dtype_name
from infd.runner.start.resolve import candidates
from infd.runner.start.runners import Runners
from infd.runner.start.setup import choose_device, set_up
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load, required_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.config import Config, DeviceConfig
    from infd.kernels.triton.compiled import Ledger
    from infd.runner.arenas.host import Headstart
    from infd.runner.pulse import Pulse
    from infd.runner.start.assembly import Loaded

log = logging.getLogger("infd.runner")


def build(
    config: Config,
    pulse: Pulse,
    progress: Callable[[int, int], None] | None = None,
    headstart: Headstart | None = None,
) -> Loaded:
    """Load the checkpoint in the directory `model.path`, and build, warm up and measure its runner.

    progress   called with (bytes of weights read, bytes to read)
    headstart  host memory for the weights, populated in the background; None: none is populated

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
        loaded.facts["kernels"] = facts = ledger.facts()
        compiled, seconds, found = facts["compiled"], facts["compile_s"], facts["found"]
        log.info("kernels: %d compiled in %.1f s, %d read from the cache", compiled, seconds, found)
    return loaded


def _keep_compiled(settings: DeviceConfig, pulse: Pulse) -> Ledger | None:
    """Make Triton and FlashInfer store compiled kernels in `device.kernel_cache`; return the record of compilations."""
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
    bank = bank_of(device)  # before set_up: memory allocated before the bank exists counts as other processes'
    setup = set_up(config, checkpoint, device, device, candidates(config))
    required = required_bytes(setup.model)
    mapping = None if headstart is None else headstart.claim(0 if bank.dedicated else required)
    free = bank.free() + (0 if headstart is None else headstart.populated)
    if required > free:
        needed = f"the weights need {required / 2**20:,.0f} MiB on {device}"
        raise OutOfMemory(f"{needed}; {free / 2**20:,.0f} MiB are free")
    if mapping is None or bank.dedicated:
        weights = bank.arena(required, "weights")
    else:
        weights = Arena(required, device, "weights", partial(Anonymous, mapping=mapping))

    def report(done: int, total: int) -> None:
        pulse.beat()
        if progress is not None:
            progress(done, total)

    stored = load(setup.model, checkpoint, weights, report, fill.native_fill())
    dtype, quantization = dtype_name(setup.dtype), config.model.quantization
    form = dtype if quantization == "none" else quantization
    of_vocabulary = vocabulary_of(quantization, config.model.quantize_vocabulary, device.type)
    vocabulary = ""
    if of_vocabulary != quantization:
        vocabulary = dtype if of_vocabulary == "none" else of_vocabulary
    forms = f"{form}, vocabulary {vocabulary}" if vocabulary else form
    log.info("weights: %.0f MiB of %s, computed in %s", required / 2**20, forms, dtype)
    if config.model.dtype == "auto" and dtype == "bfloat16" and stored_dtype(checkpoint.config) in (None, "float32"):
        log.info(
            "the checkpoint is in float32; this processor is much faster in bfloat16. --dtype float32 keeps float32"
        )
    for label, count in stored.items():
        log.info("weights: %d matrices are stored as %s", count, label)
    if any(label.endswith("kept") and "fp8" not in label for label in stored):
        log.info(
            "weights: products with kept integers quantize activations to int8, unless --exact-activations is given"
        )
    unused = [name for name in checkpoint.tensors if name.endswith("_scale") and name in setup.model.unread]
    if unused:
        log.info(
            "%d scales of the checkpoint, such as %s, are not used: queries are not quantized, and keys and values only"
            " with --kv-cache-dtype fp8",
            len(unused),
            unused[0],
        )
    if heads := [name for name in checkpoint.tensors if name.startswith(LABEL_HEADS) and name in setup.model.unread]:
        log.info("weights: the head for labels (%s) is not used: the model embeds", ", ".join(heads))
    try:
        source = WeightsSource.of(checkpoint)
        loaded = assemble(Runners(config, setup, bank, pulse), bank, weights, source)
    except RequestFailed as error:  # the trial steps failed
        raise CheckpointError(
            f"{checkpoint.directory}: the first step failed: {error}; the weights are damaged, or need another"
            f" model.dtype (--dtype) than {dtype}"
        ) from error
    loaded.residence.stored = stored
    if device.type == "cpu" and (missing := library.why_not()) is not None:
        log.warning("native kernels are not used, so answers take many times as long: %s", missing)
        loaded.facts["native_missing"] = missing
    loaded.facts.update(
        dtype=dtype,
        quantization=quantization,
        vocabulary=vocabulary,
        arch=architecture(checkpoint.config),
        ops=setup.ops.describe(),
    )
    return loaded
