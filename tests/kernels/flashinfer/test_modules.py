"""FlashInfer's modules: which are compiled ahead of time, and in which directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infd.errors import DeviceMissing
from infd.kernels.flashinfer import modules
from tests.kernels.flashinfer.documented import INSTALLED

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not INSTALLED, reason="flashinfer is not installed")
@pytest.mark.parametrize(
    ("variant", "cached", "overrides", "expected"),
    [
        ("qwen3", "auto", {}, {"xqa", "silu", "page"}),
        # With a softcap decoding is planned; two query heads a key head decode without tensor cores.
        ("gemma2", "auto", {"query_pre_attn_scalar": 64}, {"batch_decode", "gelu", "page"}),
        # Triton writes an fp8 cache.
        ("qwen3", "fp8", {"head_dim": 128}, {"batch_decode", "silu"}),
    ],
)
def test_the_first_steps_ask_for_every_module_that_others_do(tiny, tmp_path, variant, cached, overrides, expected):
    pytest.importorskip("triton")
    expected = {*expected, "batch_prefill", "norm", "rope"}
    directory = shutil.copytree(tiny(variant), tmp_path / variant)
    settings = json.loads((directory / "config.json").read_text())
    # Nothing is computed, so head size and context length may be changed to ones that FlashInfer supports.
    settings |= {"head_dim": 64, "max_position_embeddings": 4096, **overrides}
    (directory / "config.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.flashinfer.requested", str(directory), str(tmp_path / "kept"), cached],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    places, unforeseen = map(json.loads, done.stdout.splitlines()[-2:])
    assert not unforeseen
    assert all(Path(place).is_relative_to(tmp_path / "kept") for place in places.values())
    assert {next(kind for kind in expected if name.startswith(kind)) for name in places} == expected


class Spec:
    """Replaces a module that fails to compile."""

    name, is_compiled, is_aot = "norm", False, False

    def __init__(self, said: str) -> None:
        self._said = said

    def build(self, *, need_lock: bool) -> None:
        raise RuntimeError(self._said)


HEADERS = """Ninja build failed. Ninja output:
[1/3] nvcc -c norm.cu
utils.h:25:10: fatal error: cublasLt.h: No such file or directory
   25 | #include <cublasLt.h>
      |          ^~~~~~~~~~~~
compilation terminated.
ninja: build stopped: subcommand failed."""
LIBRARIES = """[3/3] c++ -shared
/usr/bin/ld: cannot find -lcudart: No such file or directory
/usr/bin/ld: cannot find -lcuda: No such file or directory
collect2: error: ld returned 1 exit status"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (HEADERS, "utils.h:25:10: fatal error: cublasLt.h: No such file or directory"),
        (
            LIBRARIES,
            "; ".join(f"/usr/bin/ld: cannot find -l{name}: No such file or directory" for name in ("cudart", "cuda")),
        ),
        ("one\ntwo\nthree\nninja: build stopped.", "two; three"),
    ],
)
def test_a_module_that_cannot_be_compiled_is_reported(said, told):
    with pytest.raises(DeviceMissing) as missing:
        modules._build(Spec(said), lambda *_: None)
    assert str(missing.value) == f"flashinfer's module norm cannot be compiled: {told}"
