"""Installation: versions, files, the systemd unit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version as installed
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from infd.admin.peers import ADMINS, READERS
from infd.daemon.install import COMMANDS, TARGETS, UNITS, install, run
from infd.errors import ConfigError
from infd.version import __version__

ROOT = Path(__file__).parent.parent
PYTHON = Path("/usr/bin/python3.11")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonical(name): Version(version) for name, version in (line.split("==") for line in lines)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(*extras: str) -> list[Requirement]:
    project = PROJECT["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(line) for lines in lists for line in lines]


@pytest.mark.parametrize("requirement", requirements("test"), ids=lambda requirement: requirement.name)
def test_every_dependency_is_pinned_to_a_version_that_its_range_allows(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonical(requirement.name)])


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_installed_versions_are_the_pinned_ones(requirement: Requirement) -> None:
    assert Version(installed(requirement.name)).public == str(pins()[canonical(requirement.name)])


def test_torch_is_held_to_the_versions_that_were_tried() -> None:
    assert "torch>=2.11,<2.14" in PROJECT["project"]["dependencies"]
    assert pins()["torch"] == Version("2.13.0")


def test_the_version_is_read_from_the_package() -> None:
    pattern = PROJECT["tool"]["scikit-build"]["metadata"]["version"]

    assert PROJECT["project"]["dynamic"] == ["version"]
    assert f'__version__ = "{__version__}"' in (ROOT / pattern["input"]).read_text()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The root of an image into which the units are installed, with an installation in /opt/infd."""
    commands = tmp_path / "opt/infd/bin"
    commands.mkdir(parents=True)
    for command in COMMANDS:
        (commands / command).write_text("#!/bin/sh\n")
        (commands / command).chmod(0o755)
    pages = tmp_path / "opt/infd/share/man/man1"
    pages.mkdir(parents=True)
    (pages / "infdctl.1").write_text(".TH")
    (pages / "another.1").write_text(".TH")
    install(tmp_path, commands, PYTHON)
    return tmp_path


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("unit", ["infd.service", "infd@.service"])
def test_the_units_are_hardened(unit: str, image: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=15", image / "etc/systemd/system" / unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout.splitlines()[-1:]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
@pytest.mark.parametrize("name", ["infd", "infd@small"])
def test_systemd_finds_no_fault_in_the_units(name: str, image: Path) -> None:
    units = [image / "etc/systemd/system" / f"{name}.{kind}" for kind in ("service", "socket")]
    for unit in units:
        if not unit.exists():
            unit.symlink_to(unit.with_name(unit.name.replace("@small", "@")))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_installed_units_name_this_installation(image: Path) -> None:
    unit = (image / "etc/systemd/system/infd.service").read_text()

    assert f"\nExecStart={image}/opt/infd/bin/infd start\n" in unit
    assert f"\nExecReload={image}/opt/infd/bin/infdctl reload\n" in unit
    assert {command: (image / "usr/local/bin" / command).resolve() for command in COMMANDS} == {
        command: image / "opt/infd/bin" / command for command in COMMANDS
    }
    (page,) = (image / "usr/local/share/man").rglob("*.1")
    assert page.relative_to(image) == Path("usr/local/share/man/man1/infdctl.1")
    assert page.resolve() == image / "opt/infd/share/man/man1/infdctl.1"
    assert "\nd /etc/infd " in (image / "etc/tmpfiles.d/infd.conf").read_text()


def test_installing_again_replaces_links_but_no_files(image: Path) -> None:
    install(image, image / "opt/infd/bin", PYTHON)
    (image / "usr/local/bin/infd").unlink()
    (image / "usr/local/bin/infd").write_text("another program")

    with pytest.raises(ConfigError, match="not a link"):
        install(image, image / "opt/infd/bin", PYTHON)


def test_an_installation_that_the_units_hide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ProtectHome"):
        install(tmp_path, Path("/home/me/venv/bin"), PYTHON)
    with pytest.raises(ConfigError, match="ProtectHome"):
        install(tmp_path, Path("/opt/infd/bin"), Path("/root/.local/bin/python3.11"))
    assert not list(tmp_path.iterdir())


def test_the_repositorys_units_are_those_of_the_package() -> None:
    assert {path.name: path.resolve() for path in (ROOT / "systemd").iterdir()} == {
        name: UNITS / name for name in TARGETS
    }


def test_the_units_user_and_the_operators_groups_are_declared() -> None:
    unit = (ROOT / "systemd" / "infd.service").read_text()
    declared = (ROOT / "systemd" / "infd.sysusers").read_text()

    assert f"\nUser={READERS}\nGroup={READERS}\n" in unit
    assert "DynamicUser" not in unit
    assert re.findall(r"^([ug]) (\S+)", declared, re.MULTILINE) == [("u", READERS), ("g", ADMINS)]


def test_units_of_a_hidden_installation_are_printed_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")

    assert run(tmp_path, show=True) == 0
    out, err = capsys.readouterr()
    assert "ExecStart=/home/me/venv/bin/infd start" in out
    assert err.startswith("infd: these units would fail: /home/me/venv/bin/infd is in a directory that the units hide")
    with pytest.raises(ConfigError, match="ProtectHome"):
        run(tmp_path, show=False)
    assert list(tmp_path.iterdir()) == []


def test_every_man_page_is_installed_in_the_section_of_its_name() -> None:
    pages = PROJECT["tool"]["scikit-build"]["wheel"]["force-include"]

    assert pages == {
        f"man/{page.name}": f"${{SKBUILD_DATA_DIR}}/share/man/man{page.suffix[1:]}/{page.name}"
        for page in (ROOT / "man").iterdir()
        if page.suffix[1:].isdigit()
    }


def test_the_units_header_installs_files_that_exist() -> None:
    header = (ROOT / "systemd" / "infd.service").read_text().partition("[Unit]")[0]
    files = re.findall(r"(?<= )(?:man|systemd)/\S+|\S+\.txt", header)

    assert len(files) == 11
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_the_unit_gives_a_drain_its_time() -> None:
    unit = (ROOT / "systemd" / "infd.service").read_text()
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)

    assert stop is not None
    assert int(stop[1]) > 60  # the built-in drain_timeout_s
    assert "\nRestartPreventExitStatus=64 78\n" in unit
    assert "\nType=notify\n" in unit
