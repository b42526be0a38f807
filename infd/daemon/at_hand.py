"""Which models are on this machine, and what keeps infd from serving one of them.

Found out from small files and the headers of large ones: nothing is fetched and no weights are read, so a model that
only transformers has code for may still turn out not to work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from infd import embedded
from infd.config import Config
from infd.daemon.examine import examine, weight_files
from infd.daemon.given import EMBEDDED
from infd.errors import CheckpointError
from infd.hub.cached import cached

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
    unchecked     what only `infd start` finds out
    """

    name: str
    path: str
    architecture: str = ""
    bytes: int = 0
    code: str | None = None
    reason: str | None = None
    unchecked: list[str] = []


def at_hand(access: HubAccess) -> Iterator[ModelAtHand]:
    """Yield the embedded model, then those in the hub's cache, by name."""
    yield look(EMBEDDED, embedded.path())
    for name, directory in cached(access):
        yield look(name, directory)


def look(name: str, directory: Path) -> ModelAtHand:
    """Say what there is to know of a checkpoint."""
    found = examine(directory, Config())
    model = ModelAtHand(
        name=name,
        path=str(directory),
        architecture=found.architecture,
        bytes=_bytes(directory),
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
