"""Compile FlashInfer's modules for a model ahead of time, without loading them or computing anything.

Modules are stored below the directory given to `keep`, in a directory for each FlashInfer version and GPU. FlashInfer
builds each module with ninja under a lock; up-to-date modules are not rebuilt. The CUDA norms are used, because
FlashInfer's CuTe norms are compiled again in each process.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from infd.errors import DeviceMissing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

LONGEST = 200  # most characters of a compiler's error line that are reported
NO_ANGLES = 0  # FlashInfer's PosEncodingMode.NONE, because keys are rotated before they are cached


def keep(directory: Path | None, capability: tuple[int, int] | None = None) -> None:
    """Make FlashInfer store its modules below `directory`; None: FlashInfer's default. Call before FlashInfer's import.

    capability  compute capability to compile for; None: the installed GPU's
    """
    os.environ["FLASHINFER_USE_CUDA_NORM"] = "1"
    if directory is not None:
        os.environ["FLASHINFER_WORKSPACE_BASE"] = str(directory)
    if capability is not None:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "{}.{}".format(*capability)


@contextmanager
def building(capability: tuple[int, int], note: Callable[[str, bool, float], object]) -> Iterator[None]:
    """Within the block, FlashInfer's kernels are compiled when called, and compute nothing.

    note  called for each module: name, whether it was already compiled, seconds taken

    Raises DeviceMissing if a module cannot be compiled.
    """
    modules = Modules(capability)
    from flashinfer.jit.core import JitSpec

    load = JitSpec.build_and_load
    JitSpec.build_and_load = lambda spec: _build(spec, note)
    before, sys.modules["flashinfer"] = sys.modules["flashinfer"], modules  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules["flashinfer"] = before
        JitSpec.build_and_load = load


def _build(spec: Any, note: Callable[[str, bool, float], object]) -> Unloaded:
    found, started = spec.is_compiled, time.monotonic()
    if not spec.is_aot:  # a precompiled module from the jit-cache package is complete
        try:
            spec.build(need_lock=True)
        except (RuntimeError, OSError) as error:
            raise DeviceMissing(f"flashinfer's module {spec.name} cannot be compiled: {_cause(str(error))}") from error
    note(spec.name, found, time.monotonic() - started)
    return Unloaded()


def _cause(output: str) -> str:
    """Return the first two errors of the compiler or linker in `output`; without errors, the last two lines."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("ninja: ")]
    errors = [line for line in lines if "error:" in line or "cannot find" in line]
    return "; ".join(line[:LONGEST] for line in (errors[:2] or lines[-2:]))


class Unloaded:
    """Replaces a compiled module that is not loaded: has every attribute, but no function that can be called."""

    def __getattr__(self, name: str) -> Unloaded:
        return self


class Modules:
    """Replaces the flashinfer module, also on a machine without a GPU.

    A call requests the module that FlashInfer's function of the same name would run.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        import_module("flashinfer")
        self._prefers = "fa3" if capability[0] == 9 else "fa2"
        self.utils = SimpleNamespace(get_compute_capability=lambda _: capability)
        self.BatchPrefillWithPagedKVCacheWrapper = self._prompts
        self.BatchDecodeWithPagedKVCacheWrapper = self._decoding
        self.rmsnorm = self.gemma_rmsnorm = self._norm
        self.fused_add_rmsnorm = self.gemma_fused_add_rmsnorm = self._norm
        self.silu_and_mul, self.gelu_tanh_and_mul = partial(self._gate, "silu"), partial(self._gate, "gelu_tanh")

    def _prompts(self, space: Tensor, *, backend: str, **_: Any) -> Planner:
        return Planner("prefill", "get_batch_prefill_module", self._prefers if backend == "auto" else backend)

    def _decoding(self, space: Tensor, *, use_tensor_cores: bool, **_: Any) -> Planner:
        if use_tensor_cores:
            return Planner("prefill", "get_batch_prefill_module", "fa2")
        return Planner("decode", "get_batch_decode_module")

    def xqa(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        output: Tensor,
        workspace_buffer: Tensor,
        semaphores: Tensor,
        num_kv_heads: int,
        page_size: int,
        *,
        sliding_win_size: int,
        **_: Any,
    ) -> None:
        shared, windowed = q.shape[2] // num_kv_heads, sliding_win_size > 0
        get = import_module("flashinfer.xqa").get_xqa_module
        get(q.dtype, k_cache.dtype, page_size, q.shape[3], shared, windowed, output.dtype, 1)

    def append_paged_kv_cache(self, *_: Any, **__: Any) -> None:
        import_module("flashinfer.page").get_page_module()

    def apply_rope_with_cos_sin_cache(self, positions: Tensor, q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        import_module("flashinfer.rope").get_rope_module()
        return torch.empty_like(q), torch.empty_like(k)

    def _norm(self, *_: Any, **__: Any) -> None:
        import_module("flashinfer.norm").get_norm_module()

    def _gate(self, activation: str, *_: Any, **__: Any) -> None:
        import_module("flashinfer.activation").get_act_and_mul_module(activation)


class Planner:
    """Replaces a wrapper: `plan` requests the module that the wrapper would run."""

    def __init__(self, part: str, name: str, *backend: str) -> None:
        self._module = import_module(f"flashinfer.{part}")
        self._name, self._backend = name, backend

    def plan(
        self,
        *arguments: Any,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        window_left: int,
        logits_soft_cap: float | None,
        **_: Any,
    ) -> None:
        head = arguments[-2]  # the last argument is the page size
        kinds = (q_data_type, kv_data_type, q_data_type)
        limits = (window_left != -1, (logits_soft_cap or 0.0) > 0)
        rest = (False,) if self._backend else ()  # the argument use_fp16_qk_reduction
        getattr(self._module, self._name)(*self._backend, *kinds, torch.int32, head, head, NO_ANGLES, *limits, *rest)

    def reset_workspace_buffer(self, *_: Tensor) -> None:
        """No-op: no kernel uses the workspace."""

    def run(self, *_: Any, **__: Any) -> None:
        """No-op: `plan` has already requested the module."""
