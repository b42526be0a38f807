"""Load the native kernels for the best instruction set of this CPU, or report why they are unavailable.

The library has a C interface, called through ctypes, which releases the GIL during calls. The library must share
torch's OpenMP runtime, since two thread pools would compete for the cores; if torch uses another runtime than libgomp,
native kernels are unavailable.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any, Final

import torch  # noqa: F401  # loads the OpenMP runtime that native.so must share

from infd.kernels.cpu.built import HERE, NOT_BUILT, STALE, digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BEST_FIRST: Final = ("amx", "avx512_bf16", "avx512", "avx2")
REFINED: Final = {"avx512_vbmi": "avx512_bf16"}  # sets of few kernels, better than those of another set

POINTER: Final = ctypes.c_void_p
INT: Final = ctypes.c_int64
FLOAT: Final = ctypes.c_float
MEMORY: Final = ctypes.c_char * 1  # MEMORY.from_buffer(array.data) passes an array, more quickly than array.ctypes


class NativeMissing(Exception):
    """Native kernels are unavailable; the message states the reason."""


class Library:
    """The native kernels of one instruction set."""

    def __init__(self, isa: str | None = None, directory: Path = HERE) -> None:
        """Load the library for `isa`, by default the best that this CPU supports. Raises NativeMissing."""
        self._library = _open(directory)
        refused = {}
        for name in (isa,) if isa else _best_first():
            missing = self._text(f"infd_{name}_missing")
            if missing is None:
                self.isa = name
                return
            refused[name] = missing
        raise NativeMissing("this CPU lacks " + "; ".join(f"{what} ({name})" for name, what in refused.items()))

    def kernel(self, name: str, *arguments: Any) -> Callable[..., None]:
        """Return a kernel as a function of ctypes `arguments`. Kernels do not check the addresses passed to them."""
        try:
            function = self._library[f"infd_{self.isa}_{name}"]
        except AttributeError:  # not refined
            function = self._library[f"infd_{REFINED.get(self.isa, self.isa)}_{name}"]
        function.argtypes = arguments
        function.restype = None
        return function

    @property
    def sources(self) -> str | None:
        """Return the digest of the sources from which the library was compiled."""
        return self._text("infd_sources")

    def _text(self, name: str) -> str | None:
        function = self._library[name]
        function.restype = ctypes.c_char_p
        text = function()
        return None if text is None else text.decode()


def address(kernel: Callable[..., Any]) -> int:
    """Return the address of a kernel's code, for other native code to call."""
    found = ctypes.cast(kernel, POINTER).value  # type: ignore[arg-type]  # a kernel is a ctypes function
    assert found is not None
    return found


def uninterrupted(kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a kernel that keeps the interpreter's lock: another thread would hold the lock longer than it computes."""
    prototype = ctypes.PYFUNCTYPE(None, *kernel.argtypes)  # type: ignore[attr-defined]  # a kernel is a ctypes function
    return prototype(address(kernel))


def why_not(isa: str | None = None) -> str | None:
    """Return the reason why native kernels, or those of an instruction set, are unavailable, or None."""
    try:
        Library(isa)
    except NativeMissing as missing:
        return str(missing)
    return None


def built_from() -> str | None:
    """Return the digest of the sources from which the native kernels were compiled; None: no native kernels."""
    try:
        return Library().sources
    except NativeMissing:
        return None


def _best_first() -> Iterator[str]:
    """Yield all sets, each set's refinements before it."""
    for name in BEST_FIRST:
        yield from (refined for refined, plain in REFINED.items() if plain == name)
        yield name


def _open(directory: Path) -> ctypes.CDLL:
    path = directory / "native.so"
    if not path.exists():
        raise NativeMissing(NOT_BUILT)
    try:
        ctypes.CDLL("libgomp.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        raise NativeMissing(
            "torch's OpenMP runtime is not libgomp.so.1, and two thread pools would compete for the cores"
        ) from None
    try:
        library = ctypes.CDLL(str(path), os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise NativeMissing(f"cannot be loaded: {error}") from error
    sources = directory / "native"
    if sources.is_dir():  # absent from an installed package
        library.infd_sources.restype = ctypes.c_char_p
        if library.infd_sources().decode() != digest(sources):
            raise NativeMissing(STALE)
    return library
