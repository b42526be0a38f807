"""The tilings of attention on a GPU, by head shape: measured tilings, or the defaults.

Results of `infd warm --tune` are stored beside the compiled kernels, in a file named after the GPU and a digest of
Triton's version and the measured kernels' sources, so that results never apply to other kernels or GPUs.
"""

from __future__ import annotations

import hashlib
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import triton

from infd import files
from infd.kernels.triton import blocks
from infd.kernels.triton.blocks import Tiling
from infd.kernels.triton.compiled import aimed_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from infd.kernels.triton.blocks import Gpu
    from infd.kernels.triton.tiles import Shape

log = logging.getLogger("infd.kernels")

SOURCES: Final = ("attention.py", "apportion.py", "tiles.py")  # the measured kernels and the tables that they read


class Tilings:
    """The tilings of one GPU, by head shape."""

    def __init__(self, gpu: Gpu, measured: Mapping[str, Tiling] | None = None) -> None:
        """measured: by the names that `shape_name` returns."""
        self.gpu = gpu
        self._measured = measured or {}
        self._requested: dict[Shape, Tiling] = {}

    @property
    def requested(self) -> list[Shape]:
        """Return the shapes looked up so far."""
        return list(self._requested)

    def __getitem__(self, shape: Shape) -> Tiling:
        if shape not in self._requested:
            self._requested[shape] = self._measured.get(shape_name(shape)) or shape.default_tiling(self.gpu)
        return self._requested[shape]


def tilings(device: torch.device) -> Tilings:
    """Return the tilings for a device: an installed GPU, the compilation target, or else a large GPU."""
    if (target := aimed_at()) is not None:
        name, installed = target
        if installed is None:
            return Tilings(blocks.absent(name))
        device = installed
    gpu = blocks.gpu(device)
    return Tilings(gpu, read(directory(), gpu) if gpu.name else None)


def shape_name(shape: Shape) -> str:
    """Return a shape's name in the file of measured tilings."""
    narrow = ", narrow" if shape.narrow else ""
    return f"{shape.kv_heads} x {shape.shared} heads of {shape.head}, {str(shape.dtype).removeprefix('torch.')}{narrow}"


def directory() -> Path:
    """Return the directory of compiled kernels."""
    return Path(triton.knobs.cache.dir)


def read(directory: Path, gpu: Gpu) -> dict[str, Tiling]:
    """Return the tilings measured on this GPU with these kernels, by shape name; empty without a readable file."""
    path = _file(directory, gpu)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Tiling])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s cannot be read, so attention uses the default tilings: %s", path, error)
        return {}


def write(directory: Path, gpu: Gpu, measured: Mapping[str, Tiling]) -> Path:
    """Merge `measured` into the stored tilings; return the file. Raises OSError."""
    path = _file(directory, gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, msgspec.json.format(msgspec.json.encode({**read(directory, gpu), **measured})))
    return path


def _file(directory: Path, gpu: Gpu) -> Path:
    digest = hashlib.blake2b(triton.__version__.encode(), digest_size=8)
    for name in SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return directory / f"attention-{re.sub(r'[^a-z0-9]+', '-', gpu.name.lower())}-{digest.hexdigest()}.json"
