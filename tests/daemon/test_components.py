"""What a model is served as, from its checkpoint and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from infd import embedded
from infd.apart.client import Worker
from infd.config import Config, DeviceConfig, PoolingConfig
from infd.daemon.components import Language, NullSizes
from infd.executors.null import DIMENSIONS, LABELS, NullExecutor

if TYPE_CHECKING:
    from infd.http.served_model import ServedModel


async def served(kind: Any, task: Any) -> ServedModel:
    config = Config(device=DeviceConfig(kind=kind), pooling=PoolingConfig(task=task))
    directory = embedded.path()
    language = Language.load(directory, config, Worker("infd.text.apart"))
    capacity = await NullExecutor(config, lambda: NullSizes.read(directory), lambda: directory).load()
    adapters: Any = None
    return language.serve(("m",), capacity, adapters)


@pytest.mark.parametrize(
    ("task", "tasks"),
    [
        ("auto", ("generate", "embed", "classify", "token_embed", "token_classify", "score")),
        ("embed", ("embed", "token_embed", "score")),
        ("classify", ("classify",)),
    ],
)
async def test_the_null_device_serves_what_is_asked_for_with_its_own_widths(task: Any, tasks: tuple[str, ...]):
    found = await served("null", task)

    assert found.tasks == tasks
    assert (found.pooling.dimensions, len(found.pooling.labels)) == (DIMENSIONS, LABELS)


async def test_on_other_devices_widths_are_the_checkpoints():
    assert (await served("cpu", "embed")).pooling.dimensions not in (0, DIMENSIONS)
