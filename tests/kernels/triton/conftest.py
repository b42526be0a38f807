"""With a GPU, Triton's kernels run on it; otherwise in Triton's interpreter."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

NATIVE = torch.cuda.is_available()
# test_apart.py needs the interpreter; tests/runner/test_overlap.py tests overlap on a GPU.
collect_ignore = ["test_apart.py"] if NATIVE else []


@pytest.fixture(scope="session")
def triton() -> None:
    """Skips without a suitable Triton. Its kernels must not be imported before this fixture is requested."""
    if NATIVE:
        pytest.importorskip("triton", minversion="3.6")
    else:
        pytest.importorskip("triton", minversion="3.8", reason="no Triton whose interpreter knows numpy 2.4")


@pytest.fixture(params=[pytest.param("cuda" if NATIVE else "interpreted", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, triton: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device that the kernels run on."""
    if request.param == "cuda":
        yield torch.device("cuda")
        return
    compute_as_hardware(monkeypatch)
    with np.errstate(over="ignore", invalid="ignore"):  # numpy warns of infinity and NaN; hardware does not
        yield torch.device("cpu")


def compute_as_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter convert and multiply narrow floats as a GPU does."""
    from triton.runtime.interpreter import InterpreterBuilder

    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    for name in ("cast_impl", "create_fp_to_fp"):
        monkeypatch.setattr(InterpreterBuilder, name, partialmethod(_cast, getattr(InterpreterBuilder, name)))


def _cast(builder: Any, original: Any, source: Any, target: Any, *rounding: Any) -> Any:
    """Convert bfloat16 and fp8 as the hardware does, to nearest; the interpreter truncates, or converts wrongly."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    kinds = {
        tl.float32: (torch.float32, np.float32),
        tl.float16: (torch.float16, np.float16),
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    }
    old, new = source.dtype.scalar, target.scalar
    if not {old, new} & {tl.bfloat16, tl.float8e4nv} or not {old, new} <= kinds.keys():
        return original(builder, source, target, *rounding)
    (before, _), (after, bits) = kinds[old], kinds[new]
    held = torch.from_numpy(np.array(source.data).view(f"i{before.itemsize}")).view(before).to(after)
    return TensorHandle(held.view(getattr(torch, f"int{8 * after.itemsize}")).numpy().view(bits), new)


def _dot(builder: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """Multiply as the hardware does; the interpreter multiplies the bits of bfloat16 as integers."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def exact(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return (x.data.astype(np.uint32) << 16).view(np.float32)
        return x.data.astype(np.float32)

    return TensorHandle(exact(a) @ exact(b) + d.data, d.dtype.scalar)


@pytest.fixture
def unsynchronised(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which waiting for the device raises; on a CPU it does nothing."""

    return waiting.unsynchronised if device.type == "cuda" else nullcontext
