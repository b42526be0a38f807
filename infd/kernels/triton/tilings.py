"""The tilings of kernels on a GPU, by kernels and shape: measured tilings, or the defaults.

Results of `infd warm --tune` are stored beside the compiled kernels, in a file for each kind of kernels. Its name has
the GPU and a digest of Triton's version and the measured kernels' sources, so that results never apply to other kernels
or GPUs. A damaged file is reported, read as empty, and replaced when tilings are next measured.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
import triton

from infd import files
from infd.kernels.triton import blocks
from infd.kernels.triton.blocks import Tiling
from infd.kernels.triton.compiled import aimed_at
from infd.kernels.triton.expert_tiles import ExpertsTiling

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from infd.kernels.triton.blocks import Gpu

log = logging.getLogger("infd.kernels")

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Shape(Protocol[T_co]):
    """The properties of a layer that decide its tiling. Hashable."""

    @property
    def name(self) -> str:
        """Return the shape's name in the file of measured tilings."""

    def default_tiling(self, gpu: Gpu) -> T_co:
        """Return the tiling that is used unless another one was measured to be faster."""


ShapeT = TypeVar("ShapeT", bound=Shape)


class Kind(NamedTuple, Generic[T]):
    """Kernels whose tilings are kept in one file.

    name     first word of the file's name
    tiling   type of their tilings
    sources  files of the measured kernels, and of the tables that they read
    """

    name: str
    tiling: type[T]
    sources: tuple[str, ...]


ATTENTION: Final = Kind("attention", Tiling, ("attention.py", "apportion.py", "tiles.py"))
EXPERTS: Final = Kind(
    "experts", ExpertsTiling, ("experts.py", "grouped.py", "packed.py", "route_blocks.py", "expert_tiles.py")
)


class Tilings(Generic[ShapeT, T]):
    """The tilings of one kind of kernels on one GPU, by shape."""

    def __init__(self, gpu: Gpu, measured: Mapping[str, T] | None = None) -> None:
        """measured: by the shapes' names."""
        self.gpu = gpu
        self._measured = measured or {}
        self._requested: dict[ShapeT, T] = {}

    @property
    def requested(self) -> list[ShapeT]:
        """Return the shapes looked up so far."""
        return list(self._requested)

    def __getitem__(self, shape: ShapeT) -> T:
        if shape not in self._requested:
            self._requested[shape] = self._measured.get(shape.name) or shape.default_tiling(self.gpu)
        return self._requested[shape]


def tilings(kind: Kind[T], device: torch.device) -> Tilings[ShapeT, T]:
    """Return the tilings for a device: an installed GPU, the compilation target, or else a large GPU."""
    if (target := aimed_at()) is not None:
        name, installed = target
        if installed is None:
            return Tilings(blocks.absent(name))
        device = installed
    gpu = blocks.gpu(device)
    return Tilings(gpu, read(kind, directory(), gpu) if gpu.name else None)


def directory() -> Path:
    """Return the directory of compiled kernels."""
    return Path(triton.knobs.cache.dir)


def read(kind: Kind[T], directory: Path, gpu: Gpu) -> dict[str, T]:
    """Return the tilings measured on this GPU with these kernels, by shape name; empty without a readable file."""
    path = _file(kind, directory, gpu)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, kind.tiling])  # type: ignore[name-defined]
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read, so the default tilings are used for %s: %s", path, kind.name, error)
        return {}


def write(kind: Kind[T], directory: Path, gpu: Gpu, measured: Mapping[str, T]) -> Path:
    """Merge `measured` into the stored tilings; return the file. Raises OSError."""
    path = _file(kind, directory, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, msgspec.json.format(msgspec.json.encode({**read(kind, directory, gpu), **measured})))
    return path


def _file(kind: Kind[T], directory: Path, gpu: Gpu) -> Path:
    digest = hashlib.blake2b(triton.__version__.encode(), digest_size=8)
    for name in kind.sources:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return directory / f"{kind.name}-{re.sub(r'[^a-z0-9]+', '-', gpu.name.lower())}-{digest.hexdigest()}.json"
