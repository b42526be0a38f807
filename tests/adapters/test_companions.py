"""The shipped adapters match the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from infd import embedded
from infd.adapters.reading import AdapterReader
from tests.models.driving import Heap, load_model

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("directory", sorted(embedded.adapters().iterdir()), ids=lambda path: path.name)
def test_a_companion_fits_the_embedded_model(directory: Path) -> None:
    cpu = torch.device("cpu")
    reader = AdapterReader(load_model(embedded.path()).targets, torch.float32, lambda _: Heap(cpu))

    assert reader.read(str(directory), None, 2**30).changes
