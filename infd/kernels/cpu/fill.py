"""Read and pack parts of weight files into memory with native code: `native/fill.cpp`."""

from __future__ import annotations

import ctypes
import os
from errno import ENODATA
from typing import TYPE_CHECKING, Final

from infd.kernels.cpu.library import INT, POINTER, Library, NativeMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    FilePart = tuple[int, int, int, int | None, int, int, int, int, int, int]  # the fields of FillPart

TURN_S: Final = 1.0  # seconds between two reports of progress


class FillPart(ctypes.Structure):
    """The C structure FillPart of `native/fill.cpp`."""

    _fields_ = (
        ("file", INT),
        ("offset", INT),
        ("bytes", INT),
        ("pack", POINTER),
        ("place", POINTER),
        ("outputs", INT),
        ("inputs", INT),
        ("first", INT),
        ("rows", INT),
        ("head", INT),
    )


class FillProgress(ctypes.Structure):
    """The C structure FillProgress of `native/fill.cpp`."""

    _fields_ = (("next", INT), ("failed", INT), ("error", INT))


class Fill:
    """Reads and packs parts of files on all OpenMP threads. Implements weights.parts.Fill."""

    def __init__(self, library: Library | None = None, turn_s: float = TURN_S) -> None:
        """Load the native code. Raises NativeMissing."""
        library = library or Library()
        self._fill = library.kernel("fill", POINTER, INT, POINTER, ctypes.c_double)
        self._turn_s = turn_s

    def __call__(self, parts: Sequence[FilePart], report: Callable[[int], None]) -> int | None:
        """Read and pack all parts, as weights.parts.Fill describes. `report` is called about every `turn_s` seconds."""
        structures = (FillPart * len(parts))(*(FillPart(*part) for part in parts))
        progress = FillProgress(0, 0, 0)
        done = 0
        while done < len(parts):
            self._fill(ctypes.addressof(structures), len(parts), ctypes.addressof(progress), self._turn_s)
            if progress.error == ENODATA:
                return int(progress.failed)
            if progress.error:
                raise OSError(progress.error, os.strerror(progress.error))
            before, done = done, min(progress.next, len(parts))
            report(sum(part.bytes for part in structures[before:done]))
        return None


def native_fill() -> Fill | None:
    """Return the native implementation of weights.parts.Fill; None if native kernels are unavailable."""
    try:
        return Fill()
    except NativeMissing:
        return None
