"""Loading the native library: found, or refused with a reason; one OpenMP runtime shared with torch."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infd.kernels.cpu.built import HERE, NOT_BUILT, STALE, why_not_built
from infd.kernels.cpu.library import BEST_FIRST, REFINED, Library, NativeMissing, address, why_not
from infd.kernels.select import CANDIDATES, select
from tests.native import kernels

CPU = torch.device("cpu")


def refusal(directory: Path) -> str:
    with pytest.raises(NativeMissing) as missing:
        Library(directory=directory)
    return str(missing.value)


def test_one_openmp_runtime_serves_torch_and_the_kernels(built):
    program = """
import torch
from infd.kernels.cpu.linear import Matrices
torch.set_num_threads(2)
form = Matrices().form(4096, 64, torch.bfloat16)
form.multiply(torch.ones(64, 64).bfloat16(), torch.zeros(form.shape).bfloat16())
torch.randn(512, 512) @ torch.randn(512, 512)
maps = open("/proc/self/maps").read().split()
print(*sorted({path for path in maps if "omp" in path.rpartition("/")[2] and ".so" in path}))
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    (runtime,) = output.split()
    assert Path(runtime).parent == Path(torch.__file__).parent / "lib"


def test_a_missing_library_is_refused_with_the_reason(tmp_path):
    assert refusal(tmp_path) == why_not_built(tmp_path) == NOT_BUILT


def test_a_library_of_other_sources_is_refused(built, tmp_path):
    same, changed = tmp_path / "same", tmp_path / "changed"
    for copy in (same, changed):
        shutil.copytree(HERE, copy)
    (changed / "native" / "kernel.h").write_text("// changed")
    Library(directory=same)
    assert why_not_built(same) is None
    assert refusal(changed) == why_not_built(changed) == STALE


def test_an_installed_library_has_no_sources_to_compare_with(built, tmp_path):
    shutil.copy(HERE / "native.so", tmp_path)
    assert Library(directory=tmp_path).sources == Library().sources


def test_a_file_that_is_not_a_library_is_refused(tmp_path):
    (tmp_path / "native.so").write_bytes(b"text")
    assert "cannot be loaded" in refusal(tmp_path)


def test_instruction_sets_share_no_inline_function(built):
    # The linker merges equal inline functions, and might keep one with instructions that the CPU lacks.
    objects = sorted((HERE.parents[2] / "build").rglob("*.o"))
    if not objects or not shutil.which("nm"):
        pytest.skip("built elsewhere")
    symbols = subprocess.run(["nm", "--defined-only", *objects], capture_output=True, text=True, check=True).stdout
    assert re.findall(r" [WVuvw] (\S+)", symbols) == []


def test_without_the_library_the_reference_is_chosen_and_the_reason_listed(monkeypatch, tmp_path):
    monkeypatch.setattr(Library.__init__, "__defaults__", (None, tmp_path))
    assert "not built" in why_not()
    ops = select(CPU, torch.bfloat16)
    ops.request(*CANDIDATES)
    assert {row["chosen"] for row in ops.describe()} == {"reference", "reference decoded"}


def test_the_best_instruction_set_is_chosen(library):
    order = ["amx", "avx512_vbmi", "avx512_bf16", "avx512", "avx2"]
    assert {*order} == {*REFINED, *BEST_FIRST}
    assert order.index(Library().isa) <= order.index(library.isa)


def test_tiles_are_used_only_with_the_systems_permission(built):
    # Linux refuses while a signal stack is too small for the tile registers.
    program = """
import ctypes, os
class Stack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None) == 0
from infd.kernels.cpu.library import Library, why_not
print(Library().isa, why_not("amx"), sep="|")
"""
    kernels("amx")
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "avx512_vbmi|this CPU lacks permission to use tile registers (amx)"


def test_a_set_that_refines_another_has_its_other_kernels(built):
    for refined, plain in REFINED.items():
        better, other = kernels(refined), kernels(plain)
        assert address(better.kernel("multiply_int8_bf16")) == address(other.kernel("multiply_int8_bf16"))
        assert address(better.kernel("multiply_float8_bf16")) != address(other.kernel("multiply_float8_bf16"))
