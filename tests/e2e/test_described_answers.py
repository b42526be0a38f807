"""schemathesis reads /openapi.json of a daemon and calls every operation: no answer is a 5xx or undescribed.

It generates bodies and parameters that the document allows and that it forbids; and sequences of calls, in which later
calls name what earlier ones have created.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from infd.http.openapi.operations import OPERATIONS
from tests.e2e.clients import FULL, idle_status
from tests.e2e.process import ROOT, Daemon

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("schemathesis", reason="`make test-all` installs it")

pytestmark = pytest.mark.exhaustive

# `make soak` runs each field's bounds too, and links that schemathesis infers.
EXAMPLES, SEQUENCES = (60, 300) if FULL else (4, 25)
CONFIG = f"""
hooks = "tests.e2e.answerable"
continue-on-failure = true
warnings = false
seed = 1
[generation]
database = "none"
[checks]
enabled = false
not_a_server_error.enabled = true
status_code_conformance.enabled = true
content_type_conformance.enabled = true
response_schema_conformance.enabled = true
use_after_free.enabled = true
ensure_resource_availability.enabled = true
[phases]
examples.enabled = false
coverage.enabled = {str(FULL).lower()}
[phases.fuzzing.generation]
max-examples = {EXAMPLES}
[phases.stateful]
max-steps = 8
inference.algorithms = {["dependency-analysis"] if FULL else []}
[phases.stateful.generation]
max-examples = {SEQUENCES}
"""


def statuses(report: Path) -> dict[str, set[int]]:
    """Return the statuses with which each operation answered."""
    found: dict[str, set[int]] = defaultdict(set)
    for line in report.read_text().splitlines():
        recorder: dict[str, Any] = json.loads(line).get("ScenarioFinished", {}).get("recorder", {})
        for id, interaction in recorder.get("interactions", {}).items():
            case = recorder["cases"][id]["value"]
            found[f"{case['method']} {case['path']}"].add((interaction["response"] or {}).get("status_code", 0))
    return found


def test_every_answer_is_described_and_none_is_a_server_error(tmp_path: Path):
    (tmp_path / "daemon").mkdir()
    config, report = tmp_path / "schemathesis.toml", tmp_path / "report.ndjson"
    config.write_text(CONFIG)
    daemon = Daemon(tmp_path / "daemon", [], {})
    try:
        host, port = daemon.ready().address
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", config, "run"]
        command += [f"http://{host}:{port}/openapi.json", "--report", "ndjson", "--report-ndjson-path", report]
        ended = subprocess.run(
            command,
            cwd=tmp_path,  # where it keeps failures
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr
        found = statuses(report)
        described = {f"{operation.method.upper()} {operation.path}" for operation in OPERATIONS}
        # The document itself, which was read first; and what needs a model trained to fill gaps, or to weigh tokens.
        unanswered = {"GET /openapi.json", "POST /infill", "POST /embed_sparse"}
        assert {name for name in described if 200 not in found[name]} <= unanswered, found
        assert idle_status(daemon).running == 0
    finally:
        daemon.close()
