"""A model on its device, with all state that outlives a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from infd.pooling import PoolingSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.kernels.families.attention import KeyValuePages
    from infd.kernels.ops import Ops
    from infd.models.base import Model
    from infd.runner.adapters import DeviceSlots
    from infd.runner.pulse import Pulse
    from infd.runner.rows import Rows
    from infd.scheduler.layout import CacheLayout


class Instance(Struct, frozen=True):
    """A model with its kernels, cache, rows and adapters. Built by `start/runners.py`, for serving and for `infd warm`.

    pooling   how hidden states become embeddings, labels and scores
    cache     the pages of keys and values, by layer
    adapters  the adapters in host memory and in the device's slots
    """

    model: Model
    ops: Ops
    layout: CacheLayout
    cache: Sequence[KeyValuePages]
    rows: Rows
    adapters: DeviceSlots
    pulse: Pulse
    pooling: PoolingSettings = PoolingSettings()
