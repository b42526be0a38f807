"""Which models are on this machine, and what keeps infd from serving one of them.

Found out from small files alone: nothing is fetched and no weights are read, so
a model that only transformers has code for may still turn out not to work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from infd import embedded
from infd.daemon.given import EMBEDDED
from infd.errors import CheckpointError
from infd.hub.cached import cached
from infd.hub.fetch import VOCABULARIES
from infd.models import registry
from infd.models.config import architecture as named
from infd.weights.checkpoint import INDEX, SINGLE, indexed_files, read_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from infd.config import HubAccess

INFD: Final = "infd"
TRANSFORMERS: Final = "transformers"
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class ModelAtHand(Struct, frozen=True, kw_only=True):
    """One model.

    name          what --model takes
    architecture  empty if config.json does not say
    bytes         of its weights
    code          whose computes it, infd's own or transformers'; None: nobody's
    reason        why not
    """

    name: str
    path: str
    architecture: str = ""
    bytes: int = 0
    code: str | None = None
    reason: str | None = None


def at_hand(access: HubAccess) -> Iterator[ModelAtHand]:
    """Yield the embedded model, then those in the hub's cache, by name."""
    yield look(EMBEDDED, embedded.path())
    for name, directory in cached(access):
        yield look(name, directory)


def look(name: str, directory: Path) -> ModelAtHand:
    """Say what there is to know of a checkpoint."""
    architecture, size = "", 0
    try:
        config = read_config(directory)
        architecture = named(config)
        weights = _weights(directory)
        size = sum(path.stat().st_size for path in weights if path.exists())
        if missing := [path.name for path in weights if not path.exists()]:
            raise CheckpointError(f"not complete: {missing[0]} is missing")
        if not any((directory / file).exists() for file in VOCABULARIES):
            raise CheckpointError("there is no tokenizer")
        if registry.is_own(config):
            code = INFD
        else:
            from infd.models.transformers.admission import admit  # takes seconds

            admit(config)
            code = TRANSFORMERS
    except (CheckpointError, OSError) as error:
        reason = str(error).removeprefix(f"{directory}/")
        return ModelAtHand(name=name, path=str(directory), architecture=architecture, bytes=size, reason=reason)
    return ModelAtHand(name=name, path=str(directory), architecture=architecture, bytes=size, code=code)


def _weights(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        return sorted(directory / file for file in set(indexed_files(index).values()))
    if not (directory / SINGLE).exists():
        raise CheckpointError("there are no safetensors")
    return [directory / SINGLE]


def as_json(found: Sequence[ModelAtHand]) -> str:
    return msgspec.json.format(msgspec.json.encode(found)).decode()


def as_table(found: Sequence[ModelAtHand]) -> str:
    """Return a line for each, under a line of headings."""
    rows = [("NAME", "ARCHITECTURE", "SIZE", "SERVED BY")]
    for model in found:
        served = f"{model.code}'s code" if model.reason is None else f"nobody: {model.reason}"
        rows.append((model.name, model.architecture or "-", _size(model.bytes), served))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _size(count: int) -> str:
    """Return bytes as people read them."""
    if not count:
        return "-"
    unit = next((unit for unit in ("KiB", "MiB", "GiB") if count < 1000 * _UNITS[unit]), "TiB")
    return f"{count / _UNITS[unit]:.3g} {unit}"
