"""Check a checkpoint with the functions that `infd start` calls, without torch and without reading weights."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.apart.client import Worker
from infd.daemon import components
from infd.errors import CheckpointError, StartError
from infd.gguf import is_gguf
from infd.gguf.file import parts
from infd.models.config import architecture
from infd.runner.arenas.host import kind
from infd.runner.start.resolve import candidates, resolve
from infd.text import apart
from infd.weights.checkpoint import INDEX, SINGLE, Checkpoint, indexed_files, read_config
from infd.weights.encodings.find import labels

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from infd.config import Config

UNREAD: Final = "whether the weights are those that the model needs, and fit into memory"


class Examined(Struct, kw_only=True):
    """The result of the checks.

    architecture  name in config.json; empty: config.json names none
    own           True: infd's own code computes the model; False: transformers' code; None: neither, or undecided
    stored        number of matrices that the checkpoint stores quantized, by encoding
    faults        messages with which `infd start` would refuse the checkpoint
    unchecked     conditions that only `infd start` can check
    """

    architecture: str = ""
    own: bool | None = None
    stored: dict[str, int] = {}
    faults: list[str] = []
    unchecked: list[str] = []

    def collect(self, check: Callable[[], object]) -> None:
        """Run `check`, and append the message of a StartError to `faults`, unless `faults` already contains it."""
        try:
            check()
        except StartError as error:
            if str(error) not in self.faults:
                self.faults.append(str(error))


def examine(directory: Path, config: Config) -> Examined:
    """Check whether the checkpoint in `directory`, or the GGUF file at this path, can be served with these settings."""
    found = Examined()
    null = config.device.kind == "null"
    found.collect(lambda: read_config(directory))
    if found.faults:  # the checks of other files need config.json
        return found
    found.collect(lambda: components.NullSizes.read(directory) if null else _decide(found, directory, config))
    if not null:
        found.collect(lambda: _read_headers(found, directory))
    with closing(Worker(apart.MODULE)) as worker:
        found.collect(lambda: components.Language.load(directory, config, worker))
    if not null and not found.faults:
        found.unchecked.append(UNREAD)
    return found


def _decide(found: Examined, directory: Path, config: Config) -> None:
    described = read_config(directory)
    device = kind(config)
    try:
        found.architecture = architecture(described)
        found.own = resolve(config, described, device, candidates(config)).own
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from error
    if not found.own:
        found.unchecked.append(f"whether transformers' code for {found.architecture} runs over infd's attention")
    if device != "cpu":
        found.unchecked.append("the capabilities of the GPU and of its kernels")


def _read_headers(found: Examined, directory: Path) -> None:
    with Checkpoint(directory) as checkpoint:
        found.stored = dict(labels(checkpoint.tensors))


def weight_files(directory: Path) -> list[Path]:
    """Return the paths of the weight files, missing ones included. Raises CheckpointError."""
    if is_gguf(directory):
        return parts(directory)
    index = directory / INDEX
    if index.exists() and not (directory / SINGLE).exists():
        return sorted(directory / file for file in set(indexed_files(index).values()))
    return [directory / SINGLE]
