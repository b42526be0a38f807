from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from infd import embedded
from tests.hub.stand_in import StandIn, stand_in

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hub() -> Iterator[StandIn]:
    """A hub with one small model, `org/tiny`, among files that must not be fetched."""
    directory = embedded.path()
    with stand_in() as server:
        model = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
        model |= {"pytorch_model.bin": b"pickle", "modeling_tiny.py": b"raise SystemExit", "README.md": b"# tiny"}
        model |= {"onnx/model.safetensors": b"", "consolidated.safetensors": b""}
        server.files["org/tiny"] = model
        yield server
