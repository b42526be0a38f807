"""`infd models`: list the models on this machine, with a reason for each model that infd cannot serve.

Reads small files and headers of weight files only; fetches nothing. A model that runs on transformers' code may still
fail at start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from infd import embedded
from infd.config import Config
from infd.daemon.examine import examine, weight_files
from infd.daemon.resolve import EMBEDDED
from infd.errors import CheckpointError
from infd.hub.cached import cached
from infd.hub.fetch import tag_of
from infd.hub.packages import pulled
from infd.weights.checkpoint import gguf_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from infd.config import HubAccess

INFD: Final = "infd"
TRANSFORMERS: Final = "transformers"
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class FoundModel(Struct, frozen=True, kw_only=True):
    """A model on this machine.

    name          argument for --model
    architecture  name in config.json; empty: config.json names none
    bytes         size of the weight files
    code          INFD or TRANSFORMERS: whose code computes the model; None: infd cannot serve the model
    stored        number of matrices that the checkpoint stores quantized, by encoding; `infdctl ops` lists how they are
                  kept in memory
    reason        why infd cannot serve the model; None: infd can
    unchecked     conditions that only `infd start` can check
    """

    name: str
    path: str
    architecture: str = ""
    bytes: int = 0
    code: str | None = None
    stored: dict[str, int] = {}
    reason: str | None = None
    unchecked: list[str] = []


def found_models(access: HubAccess, models: Path | None = None) -> Iterator[FoundModel]:
    """Yield the embedded model, the models that packages carried, and the Hugging Face cache's in order of name.

    models  see `pull` in hub/packages.py
    """
    yield inspect(EMBEDDED, embedded.path())
    yield from (inspect(name, file) for name, file in pulled(models))
    for name, directory in cached(access):
        files = gguf_files(directory)
        yield from (inspect(f"{name}:{tag_of(file)}", file) for file in files)
        if not files:
            yield inspect(name, directory)


def inspect(name: str, directory: Path) -> FoundModel:
    """Return the model in `directory`, or in the GGUF file at this path, examined with the default settings."""
    found = examine(directory, Config())
    model = FoundModel(
        name=name,
        path=str(directory),
        architecture=found.architecture,
        bytes=_bytes(directory),
        stored=found.stored,
        unchecked=found.unchecked,
    )
    if found.faults:
        return replace(model, reason=found.faults[0].replace(f"{directory}/", "").removeprefix(f"{directory}: "))
    return replace(model, code=INFD if found.own else TRANSFORMERS)


def _bytes(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in weight_files(directory) if path.exists())
    except (CheckpointError, OSError):
        return 0


def as_json(found: Sequence[FoundModel]) -> str:
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def as_table(found: Sequence[FoundModel]) -> str:
    """Return a table with a header and a line for each model."""
    rows = [("NAME", "ARCHITECTURE", "SIZE", "SERVED BY")]
    for model in found:
        listed = "; ".join(f"{label} ({count} matrices)" for label, count in model.stored.items())
        served = f"{model.code}'s code{listed and f', stored as {listed}'}"
        if model.reason is not None:
            served = f"nobody: {model.reason}"
        rows.append((model.name, model.architecture or "-", _size(model.bytes), served))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _size(count: int) -> str:
    """Return a size with three significant digits and a binary unit; "-" for 0 bytes."""
    if not count:
        return "-"
    unit = next((unit for unit in ("KiB", "MiB", "GiB") if count < 1000 * _UNITS[unit]), "TiB")
    return f"{count / _UNITS[unit]:.3g} {unit}"
