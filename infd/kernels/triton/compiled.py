"""Where compiled kernels are kept, and how they are compiled for a GPU that need not be here.

Triton keys an entry by the source of a kernel and of all that it calls, by the types and constants it is compiled for,
by the GPU, and by the versions of itself and of the assembler; it is written beside its place and renamed into it. So a
directory may be shared by several processes, and what no longer fits is never found.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import triton
from msgspec import Struct
from triton.backends.compiler import GPUTarget

from infd.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

_NVIDIA = re.compile(r"sm_(\d{2,3})[af]?")
_AMD = re.compile(r"gfx\d+[a-z]?")


class Entry(Struct, frozen=True):
    """One kernel that was asked for. seconds: what it took; `found` says that it was compiled already."""

    kernel: str
    found: bool
    seconds: float


class Ledger:
    """What was asked of the compiler since the directory was chosen."""

    def __init__(self, notify: Callable[[Entry], object]) -> None:
        """notify: called with every entry. A cold start is minutes of nothing but compiling."""
        self.entries: list[Entry] = []
        self._notify = notify

    def note(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        self.add(Entry(src.name, cache_hit, times.total / 1e6))

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self._notify(entry)

    def facts(self) -> dict[str, Any]:
        made = [entry for entry in self.entries if not entry.found]
        return {
            "compiled": len(made),
            "found": len(self.entries) - len(made),
            "compile_s": round(sum(entry.seconds for entry in made), 3),
        }


def keep(directory: Path | None, notify: Callable[[Entry], object]) -> Ledger:
    """Look for compiled kernels in `directory` from now on, and put them there; None: where Triton does by itself.

    Raises OSError where nothing can be written there.
    """
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        triton.knobs.cache.dir = str(directory)
    ledger = Ledger(notify)
    triton.knobs.compilation.listener = ledger.note
    return ledger


def target(name: str) -> GPUTarget:
    """Return what compilers call the GPU `name`, such as sm_90a or gfx942. Raises UsageError."""
    if nvidia := _NVIDIA.fullmatch(name):
        return GPUTarget("cuda", int(nvidia[1]), 32)
    if _AMD.fullmatch(name):
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise UsageError(f"--target {name}: expected a GPU as its compiler calls it, such as sm_90a or gfx942")


def here() -> GPUTarget:
    """Return the GPU of this machine."""
    return triton.runtime.driver.active.get_current_target()


def name(gpu: GPUTarget) -> str:
    """Return what its compiler calls a GPU."""
    return f"sm_{gpu.arch}" if gpu.backend == "cuda" else str(gpu.arch)


def aimed_at() -> tuple[str, torch.device | None] | None:
    """Return the name of the GPU that is compiled for, in `compiling`, and where it is here; None elsewhere."""
    active = triton.runtime.driver._active
    return (name(active.get_current_target()), active.device) if isinstance(active, _Absent) else None


@contextmanager
def compiling(gpu: GPUTarget, device: torch.device | None = None) -> Iterator[None]:
    """Compile whatever is launched in here, for `gpu`, and launch nothing. Tensors need no memory behind them.

    device  where that GPU is here
    """
    run, drivers = triton.JITFunction.run, triton.runtime.driver

    def compile_alone(kernel: Any, *args: Any, warmup: bool, **named: Any) -> Any:
        return run(kernel, *args, warmup=True, **named)

    before = drivers._active
    drivers.set_active(_Absent(gpu, device))
    triton.JITFunction.run = compile_alone
    try:
        yield
    finally:
        triton.JITFunction.run = run
        drivers._active = before


class _Absent:
    """Stands for the driver of a GPU. Itself the device, so that no kernel takes what it keeps of a real one's."""

    def __init__(self, gpu: GPUTarget, device: torch.device | None) -> None:
        self._gpu = gpu
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return self._gpu

    def get_current_device(self) -> _Absent:
        return self

    def get_current_stream(self, _: _Absent) -> int:
        return 0
