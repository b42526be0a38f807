"""Where there is a GPU, whatever is tested of its kernels is what `-m gpu` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FOR_GPUS = {HERE / "triton", HERE / "flashinfer"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if item.path.parent in FOR_GPUS:
                item.add_marker(pytest.mark.gpu)
