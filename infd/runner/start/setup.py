"""Choose a checkpoint's device, dtype, kernels and longest sequence, and build its model without weights.

Reads only config.json and the headers of weight files. Of the model's tensors, only tables such as rotary angles
are allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from infd.errors import CheckpointError, DeviceMissing
from infd.kernels.select import select
from infd.models import registry
from infd.models.config import head_size
from infd.pooling import PoolingSettings, configured
from infd.runner.start.resolve import longest, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.config import Config
    from infd.kernels.ops import Ops
    from infd.kernels.select import Candidate
    from infd.models.base import Model
    from infd.request import PoolTask
    from infd.weights.checkpoint import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelSetup(NamedTuple):
    """A model without weights, and its kernels.

    dtype    dtype of activations
    device   device of the model's tensors
    max_len  tokens of the longest sequence
    pooling  how hidden states become embeddings, labels and scores
    """

    model: Model
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    max_len: int
    pooling: PoolingSettings = PoolingSettings()

    @property
    def task(self) -> PoolTask | None:
        """What prompts are pooled for in steps of the start; None: they are continued."""
        return None if self.model.generates else self.pooling.tasks[0]


def set_up(
    config: Config,
    checkpoint: Checkpoint,
    device: torch.device,
    memory: torch.device,
    candidates: Mapping[str, Sequence[Candidate]],
) -> ModelSetup:
    """Build a checkpoint's model. Raises CheckpointError, ConfigError, DeviceMissing.

    device  the device for which kernels are chosen
    memory  device of the model's tensors; equals `device` except in `infd warm`, which computes nothing
    """
    described = checkpoint.config
    try:
        resolved = resolve(config, described, device.type, candidates)
        assert resolved.dtype is not None
        dtype = DTYPES[resolved.dtype]
        ops = select(device, dtype, candidates, head=head_size(described))
        max_len = resolved.max_len or longest(config.model.max_model_len, registry.transformers_length(described))
        pooling = configured(config.pooling, checkpoint.directory, described)
        model = registry.build(
            described, ops, dtype=dtype, device=memory, max_len=max_len, stored=checkpoint.tensors, pooling=pooling
        )
    except CheckpointError as error:  # adds the directory to the message
        raise CheckpointError(f"{checkpoint.directory}: {error}") from error
    ops.request("rows", "draw")  # now, so that a start without usable kernels fails before weights are read
    if model.targets:
        ops.request("lora")
    return ModelSetup(model, ops, dtype, memory, max_len, pooling)


def choose_device(kind: str) -> torch.device:
    """Return the device that `kind` names. A GPU becomes this thread's current device. Raises DeviceMissing."""
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise DeviceMissing(f"device.kind is {kind!r}, but torch {torch.__version__} {built}")
    index = int(kind.partition(":")[2] or torch.cuda.current_device())
    if index >= (count := torch.cuda.device_count()):
        raise DeviceMissing(f"device.kind is {kind!r}, but the last of {count} GPUs is cuda:{count - 1}")
    torch.cuda.set_device(index)  # driver calls and libraries use the thread's current device
    return torch.device("cuda", index)
