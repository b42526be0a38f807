"""`infd run-batch` as a process: whole runs, runs that are stopped or killed, and the runs that go on after them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

USER = {"role": "user", "content": "What is infd?"}
PATIENCE_S = 120


class Run:
    """The files of a batch, and the processes that work on it."""

    def __init__(self, directory: Path) -> None:
        self.source, self.output = directory / "in.jsonl", directory / "out.jsonl"
        (directory / "infd.toml").touch()
        self._directory = directory
        self._processes: list[subprocess.Popen[str]] = []

    def write(self, requests: Sequence[dict[str, Any]]) -> None:
        self.source.write_text("".join(json.dumps(request) + "\n" for request in requests))

    def start(self, *arguments: str, limit: int = resource.RLIM_INFINITY) -> subprocess.Popen[str]:
        """Start the command; `limit` is the largest file, in bytes, that it can write."""
        command = [sys.executable, "-m", "infd", "run-batch", "-i", str(self.source), "-o", str(self.output)]
        command += ["--config", str(self._directory / "infd.toml"), *arguments]
        variables = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(self._directory / "cache"), "INFD_API_KEY": "k"}
        process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
        self._processes.append(process)
        return process

    def finish(self, *arguments: str) -> int:
        process = self.start(*arguments)
        _, said = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in said, said
        return process.returncode

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def await_records(self, count: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while not self.output.exists() or self.output.read_bytes().count(b"\n") < count:
            assert time.monotonic() < until
            time.sleep(0.005)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    yield found
    found.close()


def completion(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "Once", "max_tokens": 8, "ignore_eos": True, **fields}
    return {"custom_id": f"request {number}", "method": "POST", "url": "/v1/completions", "body": body}


def test_each_line_of_each_api_is_answered_or_refused(run: Run):
    chat = {"messages": [USER], "temperature": 0, "max_tokens": 60}
    forced = {**chat, "tool_choice": "required"}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    run.write(
        [
            {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {
                "custom_id": "tool",
                "url": "/v1/chat/completions",
                "body": forced | {"tools": [tool]},
            },
            {"custom_id": "message", "url": "/v1/messages", "body": {"messages": [USER], "max_tokens": 5}},
            {"custom_id": "response", "url": "/v1/responses", "body": {"input": "hi", "max_output_tokens": 5}},
            {"custom_id": "wrong", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": -1}},
            {"custom_id": "nowhere", "url": "/nowhere", "body": {}},
            {"custom_id": "chat", "url": "/v1/chat/completions", "body": chat},
        ]
    )

    assert run.finish() == os.EX_DATAERR

    found = {(record["id"], record["custom_id"]): record for record in run.records()}
    sent = [(name, record["response"]) for (_, name), record in found.items() if name != "chat"]
    status = {name: response["status_code"] for name, response in sent}
    assert status == {"tool": 200, "message": 200, "response": 200, "wrong": 400, "nowhere": 404}
    first, second = found["batch_req_1", "chat"], found["batch_req_7", "chat"]
    assert "infd" in first["response"]["body"]["choices"][0]["message"]["content"]
    assert (second["response"], "line 1" in second["error"]["message"]) == (None, True)
    (choice,) = found["batch_req_2", "tool"]["response"]["body"]["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert found["batch_req_5", "wrong"]["response"]["body"]["error"]["param"] == "max_tokens"

    before = run.output.read_bytes()
    assert run.finish() == os.EX_DATAERR
    assert run.output.read_bytes() == before


def test_a_run_goes_on_after_a_kill_without_losing_or_repeating_a_line(run: Run):
    run.write([completion(number) for number in range(300)])
    slow = ("--device", "null", "--set", "device.null_step_ms=5", "--concurrency", "4")
    for done in (20, 50):
        process = run.start(*slow)
        run.await_records(done)
        process.kill()
        process.wait()
    with run.output.open("ab") as torn:
        torn.write(b'{"id":"batch_req_300","custom_id":"req')
    killed = run.output.read_bytes()
    assert 50 <= killed.count(b"\n") < 300

    assert run.finish("--device", "null") == os.EX_OK

    records = run.records()
    assert run.output.read_bytes().startswith(killed[: killed.rindex(b"\n") + 1])
    assert sorted(record["custom_id"] for record in records) == sorted(f"request {number}" for number in range(300))
    assert {len(record["response"]["body"]["choices"]) for record in records} == {1}


@pytest.mark.exhaustive
def test_term_lets_requests_in_flight_finish_and_begins_no_more(run: Run):
    run.write([completion(number, max_tokens=100) for number in range(200)])
    process = run.start("--device", "null", "--set", "device.null_step_ms=5", "--concurrency", "4")
    run.await_records(4)

    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == os.EX_TEMPFAIL, said
    records = run.records()
    assert 4 <= len(records) < 200
    assert {record["response"]["status_code"] for record in records} == {200}
    assert run.finish("--device", "null") == os.EX_OK
    assert len({record["custom_id"] for record in run.records()}) == len(run.records()) == 200


@pytest.mark.exhaustive
def test_a_queue_that_is_full_delays_a_batch_and_fails_no_line(run: Run):
    run.write([completion(number) for number in range(60)])

    assert run.finish("--device", "null", "--set", "scheduler.max_waiting=4", "--concurrency", "60") == os.EX_OK

    assert {record["response"]["status_code"] for record in run.records()} == {200}


def test_no_other_process_reaches_the_endpoint(run: Run):
    run.write([completion(0)])
    process = run.start("--device", "null", "--set", "log.format=json")
    _, said = process.communicate(timeout=PATIENCE_S)

    (listening,) = [record for record in map(json.loads, said.splitlines()) if record["message"] == "listening"]
    assert process.returncode == os.EX_OK
    assert listening["address"].startswith("unix:")
    assert not os.path.exists(os.path.dirname(listening["address"].removeprefix("unix:")))


def test_an_output_that_cannot_be_written_ends_the_run_which_then_continues(run: Run):
    run.write([completion(number) for number in range(40)])
    process = run.start("--device", "null", limit=4096)
    _, said = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == os.EX_IOERR, said
    assert "the same command continues the run" in said
    assert "Traceback" not in said
    assert run.finish("--device", "null") == os.EX_OK
    assert len({record["custom_id"] for record in run.records()}) == len(run.records()) == 40


@pytest.mark.exhaustive
def test_embeddings_scores_and_ranks_are_answered_in_a_batch(run: Run):
    bodies = {
        "/v1/embeddings": {"input": ["a", "b"]},
        "/v1/score": {"text_1": "a", "text_2": ["a", "b"]},
        "/v1/rerank": {"query": "a", "documents": ["b", "a"]},
        "/classify": {"input": "a"},
    }
    requests = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    run.write([*requests, {"custom_id": "wrong", "method": "POST", "url": "/v1/embeddings", "body": {"input": []}}])

    assert run.finish("--device", "null") == os.EX_DATAERR
    found = {record["custom_id"]: record["response"] for record in run.records()}
    assert {name: answer["status_code"] for name, answer in found.items()} == {
        **dict.fromkeys(bodies, 200),
        "wrong": 400,
    }
    assert len(found["/v1/embeddings"]["body"]["data"]) == 2
    assert found["/v1/score"]["body"]["data"][0]["score"] == pytest.approx(1)
    assert found["/v1/rerank"]["body"]["results"][0]["index"] == 1
    assert found["/classify"]["body"]["data"][0]["label"].startswith("LABEL_")
