"""The embedded model with quantized weights and cache."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.process import ROOT, Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

openai = pytest.importorskip("openai")

INFDCTL = "from infd.admin.ctl import main; main()"
SMALLER = {
    "weights int8": ["--quantization", "int8"],
    "weights int4": ["--quantization", "int4", "--quantize-vocabulary", "int4"],
    "weights int4, vocabulary int8, cache int8": ["--quantization", "int4", "--kv-cache-dtype", "int8"],
    "weights int8, cache fp8": ["--quantization", "int8", "--kv-cache-dtype", "fp8"],
    "vocabulary int8": ["--quantize-vocabulary", "int8"],
}


@pytest.fixture(params=SMALLER)
def daemon(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, ["--device", "cpu", "--set", "device.threads=1", *SMALLER[request.param]], {})
    try:
        yield daemon.ready()
    finally:
        daemon.close()


def infdctl(daemon: Daemon, *arguments: str) -> str:
    command = [sys.executable, "-c", INFDCTL, "--socket", str(daemon.admin_socket), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_quantized_model_answers_and_status_names_its_dtypes(daemon: Daemon, request: pytest.FixtureRequest):
    smaller = request.node.callspec.params["daemon"]
    host, port = daemon.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"messages": [{"role": "user", "content": "What is infd?"}], "temperature": 0, "max_tokens": 60}
        answers = [client.chat.completions.create(model="embedded", **asked).choices[0].message for _ in range(2)]
    # The second one finds its prompt in the cache.
    assert "daemon" in (answers[0].content or "")
    assert answers[1] == answers[0]

    now = json.loads(infdctl(daemon, "status", "--json"))
    kinds = dict(part.split() for part in smaller.split(", "))
    assert now["quantization"] == kinds.get("weights", "none")
    assert now["vocabulary"] == kinds.get("vocabulary", "")
    assert now["cache_dtype"] == kinds.get("cache", now["dtype"])
    assert f" {now['dtype']}, {smaller}\n" in infdctl(daemon, "status")
    ready = daemon.log("ready")
    assert {what: ready[what] for what in ("weights", "vocabulary", "cache") if what in ready} == kinds
    kept = ", vocabulary ".join(kind for what, kind in {"weights": now["dtype"], **kinds}.items() if what != "cache")
    assert f" MiB of {kept}, computed in {now['dtype']}" in daemon.log_text()
    assert f" MiB of {now['cache_dtype']} (" in daemon.log_text()
