"""The native kernels, in every instruction set that this CPU has."""

from __future__ import annotations

import shutil

import pytest

from infd.kernels.cpu.library import BEST_FIRST, Library, NativeMissing, why_not


@pytest.fixture(scope="session")
def built() -> None:
    """Skip without native kernels, unless a compiler is present, which should have built them."""
    reason = why_not()
    if reason is not None and shutil.which("g++") and shutil.which("cmake"):
        pytest.fail(f"native kernels: {reason} (`make native` builds them)")
    if reason is not None:
        pytest.skip(f"native kernels: {reason}")


@pytest.fixture(scope="session", params=BEST_FIRST)
def library(request: pytest.FixtureRequest, built: None) -> Library:
    return kernels(request.param)


def kernels(isa: str) -> Library:
    """Return the kernels of an instruction set; skip if this CPU lacks it."""
    try:
        return Library(isa)
    except NativeMissing as missing:
        pytest.skip(str(missing))
