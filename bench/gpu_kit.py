"""Collect the packages that a GPU machine without a package index lacks, to copy there with the tree.

    make gpu-kit                              wheels for CPython 3.12, x86-64: gpu_kit.txt
    make gpu-kit KIT_FLAGS=--flashinfer       also FlashInfer: its Python code and modules compiled here, without a GPU

FlashInfer has half a gigabyte of sources, and a module takes minutes to compile. The modules for MODELS are therefore
compiled here (`infd warm`, nvcc of CUDA 13) and packed where FlashInfer searches for precompiled modules, with its
Python code and the few templates read to name a module. A module depends on libcudart.so.13, the C++ runtime and
apache-tvm-ffi of the same version; neither on Python nor on torch.

Compiling needs headers and a library that the bare toolkit lacks: curand's come from its wheel; cuBLAS's are included
but unused, so empty files suffice; the driver's library is only linked by name.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
MOST_BYTES = 45 * 2**20  # of the kit, without the tree
TOOLKIT = Path("/usr/local/cuda/bin/nvcc")
TARGET, CAPABILITY = "sm_90a", (9, 0)
PYTHON = "3.12"
PLATFORMS = [f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_17", "2014")]
CURAND = "nvidia-curand==10.4.0.35"
UNUSED = ("cublasLt.h", "cublas_v2.h")
HEADS = (16, 32)  # query heads, with 8 key heads: Qwen3-0.6B; Qwen3-8B and Llama 3.1 8B
HEAD, PAGE = 128, 16
CACHES = ("auto", "fp8")


def download(names: Sequence[str], folder: Path, flags: Sequence[str], *, here: bool = False) -> None:
    """Fetch wheels without dependencies. `here`: for this machine; else for the GPU machine."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if not here:
        command += ["--python-version", PYTHON, "--implementation", "cp"]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, "--dest", str(folder), *flags, *names], check=True)


def toolkit(folder: Path, flags: Sequence[str]) -> dict[str, str]:
    """Put headers and libraries that nvcc lacks into `folder`; return the variables that point FlashInfer there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in UNUSED:
        if not (folder / name).exists():  # a newer header would recompile modules
            (folder / name).touch()
    library = ["cc", "-shared", "-fPIC", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so"]
    subprocess.run(library, cwd=folder, check=True)
    if not (folder / "curand_kernel.h").exists():
        with tempfile.TemporaryDirectory() as fetched:
            download([CURAND], Path(fetched), flags, here=True)
            (wheel,) = Path(fetched).glob("*.whl")
            with zipfile.ZipFile(wheel) as opened:
                for name in opened.namelist():
                    if name.endswith(".h"):
                        (folder / Path(name).name).write_bytes(opened.read(name))
    # FlashInfer uses the parent folder of the first nvcc in $PATH, which may be a script elsewhere.
    cuda = os.environ.get("CUDA_HOME", str(TOOLKIT.parents[1]))
    found = {"FLASHINFER_EXTRA_CUDAFLAGS": f"-I{folder}", "FLASHINFER_EXTRA_LDFLAGS": f"-L{folder}"}
    return {"CUDA_HOME": cuda, **found}


def checkpoint(directory: Path, heads: int) -> None:
    """Write a small checkpoint with a large model's heads; modules depend on the heads only."""
    import torch
    from gpu_machine import MODELS
    from gpu_served import write

    from infd.kernels.select import select
    from infd.models import registry

    config, cpu = {**MODELS["tiny"], "num_attention_heads": heads}, torch.device("cpu")
    ops = select(cpu, torch.bfloat16)
    directory.mkdir(parents=True, exist_ok=True)
    write(registry.build(config, ops, dtype=torch.bfloat16, device=cpu, max_len=8192), config, directory, cpu)


def compile_modules(folder: Path, flags: Sequence[str]) -> Iterator[Path]:
    """Compile the models' modules, unless present in `folder`; yield each module."""
    env = dict(os.environ, **toolkit(folder / "stubs", flags))
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env["PATH"]))  # for ninja
    kept = folder / "cache"
    for heads in HEADS:
        model = folder / f"h{heads}"
        if not (model / "config.json").exists():
            checkpoint(model, heads)
        for cache in CACHES:
            print(f"modules of {heads} heads, cache {cache}", flush=True)
            command = [sys.executable, "-m", "infd", "warm", "--target", TARGET, "--model", str(model)]
            command += ["--dtype", "bfloat16", "--set", "device.flashinfer=true", "--set", f"cache.dtype={cache}"]
            command += ["--set", f"device.kernel_cache={kept}"]
            subprocess.run(command, cwd=ROOT, env=env, check=True)
    print("modules that tests and comparisons ask for besides", flush=True)
    subprocess.run([sys.executable, __file__, "--beside", str(kept)], cwd=ROOT, env=env, check=True)
    version = metadata.version("flashinfer-python")
    yield from sorted((kept / ".cache/flashinfer" / version / TARGET.removeprefix("sm_") / "cached_ops").glob("*/*.so"))


def beside(kept: Path) -> None:
    """Compile modules that only tests and bench/gpu.py use: planned decoding, FA2 prefill, another gate."""
    import torch

    from infd.kernels.flashinfer import modules

    modules.keep(kept, CAPABILITY)
    with modules.building(CAPABILITY, lambda name, found, seconds: print(f"{name}: {seconds:.0f} s", flush=True)):
        package: Any = sys.modules["flashinfer"]
        package.gelu_tanh_and_mul()
        kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
        for wrapper in (
            package.BatchDecodeWithPagedKVCacheWrapper(None, use_tensor_cores=False),
            package.BatchPrefillWithPagedKVCacheWrapper(None, backend="fa2"),
        ):
            wrapper.plan(HEAD, PAGE, **kinds, window_left=-1, logits_soft_cap=None)


def pack_flashinfer(kit: Path, built: Path, flags: Sequence[str]) -> None:
    """Write flashinfer.tar.xz: two packages and the modules, laid out for a directory of $PYTHONPATH."""
    wanted = (BENCH / "gpu_kit_flashinfer.txt").read_text()
    pins = dict(line.split("==") for line in wanted.splitlines() if "==" in line)
    for name, version in pins.items():
        if metadata.version(name) != version:
            raise SystemExit(f"{name} here is {metadata.version(name)}; gpu_kit_flashinfer.txt names {version}")
    modules = list(compile_modules(built, flags))
    spec = find_spec("flashinfer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0])
    with tempfile.TemporaryDirectory() as fetched, tarfile.open(kit / "flashinfer.tar.xz", "w:xz", preset=3) as archive:
        for path in pruned(package):
            archive.add(path, f"flashinfer/{path.relative_to(package)}")
        for module in modules:
            archive.add(module, f"flashinfer/data/aot/{module.stem}/{module.name}")
        download([f"apache-tvm-ffi=={pins['apache-tvm-ffi']}"], Path(fetched), flags)
        (wheel,) = Path(fetched).glob("*.whl")
        unpacked = Path(fetched) / "tvm-ffi"
        zipfile.ZipFile(wheel).extractall(unpacked)  # noqa: S202 - pip fetched it
        for path in unpacked.iterdir():
            archive.add(path, path.name)
    print(json.dumps({module.stem: module.stat().st_size for module in modules}, indent=1))


def pruned(package: Path) -> Iterator[Path]:
    """Yield FlashInfer's Python files, and the sources read to name a module."""
    data = package / "data"
    for path in sorted(package.rglob("*")):
        inside = path.is_relative_to(data)
        kept = path.parent == data / "csrc" if inside else path.suffix in (".py", ".json")
        if path.is_file() and (kept or path.parent == data) and path.suffix != ".pyc":
            yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-kit")
    parser.add_argument("--flashinfer", action="store_true", help="needs nvcc, and what `make test-triton` installs")
    parser.add_argument("--built", type=Path, default=ROOT / "build" / "gpu-kit", help="where modules are compiled")
    parser.add_argument("--pip", default="", help="flags for pip, such as another index")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.beside is not None:
        beside(asked.beside)
        return
    flags = asked.pip.split()
    asked.out.mkdir(parents=True, exist_ok=True)
    for old in asked.out.glob("*.whl"):
        old.unlink()
    download(["--requirement", str(BENCH / "gpu_kit.txt")], asked.out, flags)
    if asked.flashinfer:
        pack_flashinfer(asked.out, asked.built.resolve(), flags)
    size = sum(path.stat().st_size for path in asked.out.iterdir())
    for path in sorted(asked.out.iterdir()):
        print(f"{path.stat().st_size / 2**20:8.2f} MiB  {path.name}")
    if size > MOST_BYTES:
        raise SystemExit(f"{asked.out} has {size / 2**20:.0f} MiB, more than the {MOST_BYTES / 2**20:.0f} to carry")


if __name__ == "__main__":
    main()
