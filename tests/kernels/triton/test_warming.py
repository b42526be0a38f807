"""`infd warm` compiles every kernel that serving requests, and finds compiled kernels again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infd.cli import main
from infd.errors import UsageError

ROOT = Path(__file__).parents[3]


def program(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("variant", "cached", "dtype"),
    [
        ("qwen3", "auto", "float32"),
        ("gemma3", "auto", "bfloat16"),
        ("qwen3", "fp8", "bfloat16"),
        ("qwen2-moe", "auto", "bfloat16"),
        ("gpt-oss", "auto", "bfloat16"),
    ],
)
def test_no_step_asks_for_a_kernel_that_the_first_steps_did_not(tiny, tmp_path, variant, cached, dtype):
    directory = shutil.copytree(tiny(variant), tmp_path / variant)
    settings = json.loads((directory / "config.json").read_text())
    decoder = settings.get("text_config", settings)
    decoder["max_position_embeddings"] = 4096  # nothing is computed, so the context may be long
    (directory / "config.json").write_text(json.dumps(settings))
    unforeseen, first = map(
        json.loads, program("-m", "tests.kernels.triton.requested", str(directory), cached, dtype).splitlines()
    )
    assert not unforeseen
    assert first > 8


@pytest.mark.usefixtures("triton")
def test_kernels_compiled_for_an_absent_gpu_are_found_again(tmp_path):
    command = ("-m", "infd", "warm", "--target", "gfx942", "--set", f"device.kernel_cache={tmp_path}")
    *kernels, summary = program(*command).splitlines()
    assert f"{len(kernels)} kernels for gfx942 in {tmp_path}: {len(kernels)} compiled, 0 were there" in summary
    (again,) = program(*command).splitlines()
    assert f"{len(kernels)} kernels for gfx942 in {tmp_path}: 0 compiled, {len(kernels)} were there" in again


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("variant", ["bert", "modernbert"])
def test_an_encoders_kernels_are_compiled_for_an_absent_gpu(tmp_path, variant):
    from tests.models import encoding

    model = encoding.make(variant, tmp_path / "model")
    given = ("--model", str(model), "--target", "sm_90a", "--set", f"device.kernel_cache={tmp_path}")
    *kernels, _ = program("-m", "infd", "warm", *given).splitlines()
    assert "attend" in {line.split()[0] for line in kernels}


@pytest.mark.usefixtures("triton")
def test_a_gpu_is_called_as_its_compiler_calls_it():
    from infd.kernels.triton.compiled import target

    assert (target("sm_90a").backend, target("sm_90a").arch) == ("cuda", 90)
    assert [target(name).warp_size for name in ("gfx942", "gfx90a", "gfx1100")] == [64, 64, 32]
    with pytest.raises(UsageError, match="such as sm_90a or gfx942"):
        target("h200")


@pytest.mark.usefixtures("triton")
def test_8_bit_floats_are_for_gpus_that_convert_them(capsys):
    with pytest.raises(SystemExit) as left:
        main(("warm", "--target", "sm_86", "--kv-cache-dtype", "fp8"))
    assert left.value.code == 69
    assert "cache.dtype fp8 requires compute capability 8.9; sm_86 is older" in capsys.readouterr().err


@pytest.mark.usefixtures("triton")
def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "kernels").write_text("")
    command = ("warm", "--target", "sm_90a", "--set", f"device.kernel_cache={tmp_path}/kernels/here")
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 78
