"""Whether the native kernels are built from the present sources. Imports no torch, as `infd config check` does not."""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
NOT_BUILT: Final = "not built: infd was installed where there was no C++ compiler that it could use"
STALE: Final = "built from other sources than the present ones: `make native` rebuilds it"


def why_not_built(directory: Path = HERE) -> str | None:
    """Return the reason why `native.so` in `directory` cannot be used, or None.

    Reads the file but does not load it, so whether this CPU has the instructions is not checked.
    """
    path = directory / "native.so"
    if not path.exists():
        return NOT_BUILT
    sources = directory / "native"
    if sources.is_dir() and digest(sources).encode() not in path.read_bytes():  # absent from an installed package
        return STALE
    return None


@cache  # each kernel class opens the library at startup, but the sources are hashed only once
def digest(sources: Path) -> str:
    """Return the digest of `sources`, as CMakeLists.txt computes it and the library contains it."""
    files = sorted((*sources.glob("*.cpp"), *sources.glob("*.h"), sources / "CMakeLists.txt"))
    digests = (sha256(path.read_bytes()).hexdigest() for path in files)
    return sha256("".join(digests).encode()).hexdigest()
