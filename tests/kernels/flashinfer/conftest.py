"""Tests of FlashInfer's results need a GPU; tests of its arguments run anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture
def gpu(gpu: torch.device) -> torch.device:
    """The GPU; skips without FlashInfer."""
    pytest.importorskip("flashinfer")
    return gpu
