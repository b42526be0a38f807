"""Where there is a GPU, FlashInfer computes; what it is told of a step is checked anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


@pytest.fixture
def gpu(gpu: torch.device) -> torch.device:
    """Skip where FlashInfer is missing, too."""
    pytest.importorskip("flashinfer")
    return gpu
