"""The Containerfile and the Kubernetes example, against a running daemon."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from infd.config import Config, Environment
from tests.e2e.process import ROOT, Daemon
from tests.thorough import SOAK

if TYPE_CHECKING:
    from collections.abc import Iterator

yaml = pytest.importorskip("yaml")

UID = 10001
INSTRUCTIONS = [
    line.partition(" ")[::2]
    for line in re.sub(r"\\\n\s*", "", (ROOT / "container/Containerfile").read_text()).splitlines()
    if line and not line.startswith("#")
]
PARTS: dict[str, dict[str, Any]] = {
    part["kind"]: part for part in yaml.safe_load_all((ROOT / "container/kubernetes.yaml").read_text())
}
POD = PARTS["Deployment"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def last(instruction: str) -> str:
    return [rest for name, rest in INSTRUCTIONS if name == instruction][-1]


def variables() -> dict[str, str]:
    return dict(word.split("=", 1) for word in shlex.split(last("ENV")))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with the image's variables, its directories beneath `tmp_path`."""
    given = {name: value.replace("/models", str(tmp_path)) for name, value in variables().items() if name != "PATH"}
    (tmp_path / "run").mkdir()
    daemon = Daemon(
        tmp_path,
        [*CONTAINER["args"][3:], "--set", "device.null_step_ms=50"],
        given | {"RUNTIME_DIRECTORY": str(tmp_path / "run")},
    )
    try:
        yield daemon.ready()
    finally:
        daemon.close()


def test_the_image_runs_infd_itself_as_a_user_without_privileges() -> None:
    assert (json.loads(last("ENTRYPOINT")), json.loads(last("CMD"))) == (["infd"], ["start"])
    assert last("USER") == f"{UID}:{UID}"
    assert last("STOPSIGNAL") == "SIGTERM"
    copied = [rest.split()[:-1] for name, rest in INSTRUCTIONS if name == "COPY" and "--from" not in rest]
    assert all((ROOT / source).exists() for sources in copied for source in sources)


@pytest.mark.exhaustive
@pytest.mark.skipif(not SOAK, reason="installs torch and builds the kernels, in minutes: make soak")
def test_the_lines_that_build_the_image_install_an_infd_that_checks_its_settings(tmp_path: Path) -> None:
    built, context = tmp_path / "infd", tmp_path / "source"
    given = {name: value for name, value in os.environ.items() if not name.startswith(("INFD_", "VIRTUAL_ENV"))}
    given["PIP_FLAGS"] = os.environ.get("PIP_FLAGS", "")  # its ARG
    context.mkdir()
    lines = []
    for name, rest in INSTRUCTIONS[: [name for name, _ in INSTRUCTIONS].index("FROM", 1)]:
        if name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                if (ROOT / source).is_dir():  # as COPY does: its content
                    shutil.copytree(ROOT / source, context / target, ignore=shutil.ignore_patterns("*.so"))
                else:
                    shutil.copy(ROOT / source, context / target)
        elif name == "RUN" and not rest.startswith("apt-get"):
            lines.append(rest.replace("/opt/infd", str(built)))
    assert len(lines) == 3
    for line in lines:
        subprocess.run(["sh", "-euc", line], cwd=context, env=given, check=True)

    command = [built / "bin/python", "-c", "import infd.kernels.cpu.library as native; print(native.__file__)"]
    where = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(built))
    assert list(Path(where.strip()).parent.glob("native.so")), "with kernels that were built here"


def test_the_images_variables_place_every_file_in_a_directory_that_may_be_written() -> None:
    given = variables()
    environment = Environment.read(given, pid=1, uid=UID)
    config = Config()

    assert str(environment.admin_socket(config)) == given["INFD_ADMIN_SOCKET"] == "/run/infd/admin.sock"
    assert str(environment.kernel_cache(config)).startswith("/models/")
    assert str(environment.models).startswith("/models/")
    assert given["HF_HOME"].startswith("/models/")
    mounted = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounted == {"/models", "/run/infd", "/tmp"}
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"]


def test_probes_and_health_check_ask_paths_that_a_daemon_answers(daemon: Daemon) -> None:
    host, port = daemon.address
    command = json.loads(last("HEALTHCHECK").partition("CMD ")[2])
    command = [sys.executable, command[1], command[2].replace("127.0.0.1:8000", f"127.0.0.1:{port}")]
    probes = {name: CONTAINER[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}

    assert host == "0.0.0.0"
    assert {daemon.get(probe["path"])[0] for probe in probes.values()} == {200}
    assert {probe["port"] for probe in probes.values()} == {CONTAINER["ports"][0]["name"]}
    assert subprocess.run(command, check=False).returncode == 0

    with daemon.stream(max_tokens=1000) as events:
        daemon.signal(signal.SIGTERM)
        daemon.wait_for("STOPPING", "1")

        assert {name: daemon.get(probe["path"])[0] for name, probe in probes.items()} == {
            "startupProbe": 200,
            "livenessProbe": 200,
            "readinessProbe": 503,
        }
        daemon.signal(signal.SIGTERM)
        assert "error" in list(events)[-1]
    daemon.exit_code()
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode != 0


def test_a_pod_has_time_to_drain() -> None:
    wait = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])

    assert POD["terminationGracePeriodSeconds"] >= wait + Config().server.drain_timeout_s + 10


def test_the_service_reaches_the_pods() -> None:
    service, deployment = PARTS["Service"]["spec"], PARTS["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]

    assert service["selector"] == deployment["selector"]["matchLabels"] == labels
    assert service["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"]
    assert str(CONTAINER["ports"][0]["containerPort"]) == last("EXPOSE")
