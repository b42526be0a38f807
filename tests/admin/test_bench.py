"""`infdctl bench` as a command."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from infd.admin.ctl import main
from tests.bench.fake_server import FakeOpenAI
from tests.http.endpoint import serving


async def infdctl(*arguments: str) -> int:
    def call() -> int:
        with pytest.raises(SystemExit) as left:
            main(["bench", *arguments])
        return int(left.value.code or 0)

    return await asyncio.to_thread(call)


ROOT = Path(__file__).parents[2]
QUICK = ("--requests", "3", "--output-tokens", "2", "--warmup", "0", "--seed", "1")


def read(path: str) -> str:
    return Path(path).read_text()


async def test_one_run_is_printed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI().serving() as server:
        code = await infdctl("--url", server.url, *QUICK, "--goodput", "ttft:60000", "e2el:0.000001")
    out, err = capsys.readouterr()

    assert code == 0
    assert "requests       3 done, 0 failed" in out
    assert "sampling       the server's defaults" in out
    assert "0.0% of requests (ttft 60000 ms, e2el 1e-06 ms)" in out
    assert "  missed ttft  0\n  missed e2el  3\n" in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["first", "between", "per", "end"]
    assert max(map(len, out.splitlines())) <= 80
    assert err.splitlines() == [f"3 requests to {server.url}/v1/chat/completions, model fake"]


@pytest.mark.parametrize("task", ["embed", "rerank", "classify"])
async def test_a_task_that_pools_is_named(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as endpoint:
        asked = ("--task", task, "--inputs", "3", "--input-tokens", "9", "--requests", "2", "--warmup", "0")
        assert await infdctl("--url", endpoint.url, *asked) == 0
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines() if "  " in line)

    assert lines["requests"].startswith("2 done, 0 failed")
    assert float(lines["inputs/s"]) > 0
    assert "output tok/s" not in lines


async def test_accepted_drafts_are_printed_by_position(capsys: pytest.CaptureFixture[str]) -> None:
    def scrape(drafts: int, first: int, second: int) -> str:
        counts = {"drafts": drafts, "draft_tokens": 2 * drafts, "accepted_tokens": first + second}
        lines = [f"vllm:spec_decode_num_{name}_total {count}" for name, count in counts.items()]
        for place, count in enumerate((first, second)):
            lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {count}')
        return "\n".join(lines) + "\n"

    async with FakeOpenAI(metrics=[scrape(5, 4, 1), scrape(15, 12, 6)]).serving() as server:
        assert await infdctl("--url", server.url, *QUICK) == 0
    out = capsys.readouterr().out

    assert "65.0% of 20 drafted tokens accepted, 2.30 tokens a step" in out
    assert [line.split() for line in out.splitlines() if "by position" in line] == [["by", "position", "80%", "50%"]]


async def test_a_sweep_has_a_row_for_each_load(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeOpenAI().serving() as server:
        code = await infdctl(
            "--base-url",
            server.url,
            *QUICK,
            "--max-concurrency=1,2",
            "--request_rate",
            "500,inf",
            "--goodput",
            "ttft:9",
        )
    rows = capsys.readouterr().out.splitlines()

    assert code == 0
    names, units, *loads, sampling = rows
    assert names.split() == ["REQ", "OUT", "TTFT", "TTFT", "TPOT", "TPOT", "GOOD"]
    assert units.split() == ["LOAD", "DONE", "ERR", "/s", "tok/s", *["p50", "ms", "p99", "ms"] * 2, "%"]
    assert max(map(len, rows)) <= 80
    assert [row[:15].strip() for row in loads] == ["500/s 1 at once", "1 at once", "500/s 2 at once", "2 at once"]
    assert sampling == "sampling: the server's defaults; seed 1"


async def test_json_is_a_file_or_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    async with FakeOpenAI().serving() as server:
        named = ("--label", "one", "--metadata", "gpu=none", "cpu=two")
        assert await infdctl("--json", str(path), "--url", server.url, *QUICK, *named) == 0
        shown = capsys.readouterr().out
        assert await infdctl("--url", server.url, *QUICK, "--json") == 0
    written, printed = json.loads(path.read_text()), json.loads(capsys.readouterr().out)

    assert "first token" in shown
    assert (written["label"], written["metadata"]) == ("one", {"gpu": "none", "cpu": "two"})
    for record in (written, printed):
        assert record["format"] == "infd-bench/1"
        assert len(record["runs"][0]["samples"]) == 3


async def test_two_measurements_are_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three, drawn = (str(tmp_path / name) for name in ("one.json", "two.json", "three.json", "out.html"))
    async with FakeOpenAI(pause_s=0.002).serving() as server:  # else chunks arrive together, and some figures are 0
        for path, runs in ((one, "1"), (two, "1"), (three, "3")):
            assert await infdctl("--url", server.url, *QUICK, "--runs", runs, "--json", path, "--plot", drawn) == 0
    alone = read(drawn)
    capsys.readouterr()
    assert await infdctl("--compare", f"{one},{two}", three, "--plot", drawn) == 0
    few = capsys.readouterr().out.splitlines()
    assert await infdctl("--compare", f"{one},{three}", three, "--margin", "1") == 0
    enough = capsys.readouterr().out.splitlines()
    assert await infdctl("--compare", one, two, "--json") == 0

    assert few[0] == f"{one},{two} -> {three}"
    assert few[2] == "8 at once: 2 and 3 runs, 6 and 9 requests"
    assert few[4].split()[-5:] == ["-", "-", "too", "few", "runs"]
    assert enough[2] == "8 at once: 4 and 3 runs, 12 and 9 requests"
    assert enough[4].split()[-2:] in (["no", "difference"], ["cannot", "tell"])
    assert max(map(len, few[1:])) <= 80
    assert "--runs 5" in few[-1]
    assert not any("--runs 5" in line for line in enough)
    assert json.loads(capsys.readouterr().out)["loads"][0]["changes"][0]["figure"] == "output"
    assert (alone.count("<summary>"), read(drawn).count("<summary>")) == (3, 5)


async def test_measurements_without_a_load_in_common_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = str(tmp_path / "one.json"), str(tmp_path / "two.json")
    async with FakeOpenAI().serving() as server:
        for path, concurrency in ((one, "1"), (two, "2")):
            assert await infdctl("--url", server.url, *QUICK, "--concurrency", concurrency, "--json", path) == 0
    capsys.readouterr()

    assert await infdctl("--compare", one, two) == 1
    out, err = capsys.readouterr()
    assert "1 at once: measured in one of the two, not compared" in out
    assert err == (
        "infdctl: the two have no load in common: measure both with the same --concurrency or --request-rate\n"
    )


async def test_a_file_that_is_no_measurement_is_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    assert await infdctl("--compare", str(path), str(path)) == 1
    assert "x.json: not written by `infdctl bench --json`" in capsys.readouterr().err


async def test_requests_are_sent_as_the_options_say(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    async with FakeOpenAI().serving() as server:
        await infdctl("--url", server.url, *QUICK, "--temperature", "0", "--top-k", "5", "--ignore-eos", "--schema",
                      str(schema), "--extra-body", '{"user": "me"}', "--header", "x-a=1", "x-b=2", "--lora-modules",
                      "a=2", "b", "--lora-assignment", "round-robin", "--endpoint", "/v1/chat/completions")  # fmt: skip

    body = server.bodies[0]
    assert (body["temperature"], body["top_k"], body["ignore_eos"], body["user"]) == (0, 5, True, "me")
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert sorted(body["model"] for body in server.bodies) == ["a", "a", "b"], "sent at once, they arrive in any order"
    assert (server.headers[0]["x-a"], server.headers[0]["x-b"]) == ("1", "2")


async def test_a_files_requests_are_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("one\ntwo\nthree\n")
    async with FakeOpenAI().serving() as server:
        assert await infdctl("--url", server.url, *QUICK, "--dataset-path", str(path), "--disable-shuffle") == 0
        path.write_text("")
        assert await infdctl("--url", server.url, *QUICK, "--dataset-path", str(path)) == 1

    assert sorted(body["messages"][0]["content"] for body in server.bodies) == ["one", "three", "two"]
    assert capsys.readouterr().err.splitlines()[-1] == f"infdctl: {path}: no request in it"


async def test_failures_are_printed_and_are_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    fates = ["", "refuse", "cut"]
    async with FakeOpenAI(fail=fates.__getitem__).serving() as server:
        assert await infdctl("--url", server.url, *QUICK) == 1
    out, err = capsys.readouterr()

    assert "  http 429 queue_full  1\n  truncated            1" in out
    assert err.splitlines()[-1] == "infdctl: 2 of 3 requests failed"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--goodput", "speed:3"], "'speed:3' is not NAME:MILLISECONDS"),
        (["--dataset", "nope"], "'nope' is not one of random, shared-prefix"),
        (["--dataset", "sharegpt"], "--dataset sharegpt needs --dataset-path FILE"),
        (["--dataset", "random", "--dataset-path", "x"], "leave out --dataset-path"),
        (["--shared", "0.5"], "--shared is of --dataset shared-prefix"),
        (["--range-ratio", "1.5"], "at least 0 and below 1"),
        (["--range-ratio", '{"x": 1}'], "its keys are input and output"),
        (["--concurrency", "1,x"], "'x' is not a valid integer"),
        (["--lora-modules", "a=b"], "is not NAME or NAME=WEIGHT"),
        (["--header", "x"], "'x' is not NAME=VALUE"),
        (["--extra-body", "[]"], "not a JSON object"),
        (["--extra-body", f"[{'9' * 5000}]"], "not JSON"),
        (["--extra-body", "[" * 100_000], "not JSON"),
        (["--schema", "/nonexistent"], "/nonexistent: No such file"),
        (["--tokenizer", "x"], "and infd lacks it: infdctl bench reads no tokenizer"),
        (["--num_prompt", "3"], "No such option"),
    ],
)
def test_wrong_options_are_usage_errors(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", *arguments])

    assert left.value.code == 2
    assert told in capsys.readouterr().err


async def test_no_server_is_exit_code_3(capsys: pytest.CaptureFixture[str], unused_tcp_port: int) -> None:
    assert await infdctl("--url", f"http://127.0.0.1:{unused_tcp_port}") == 3
    assert "is the server running" in capsys.readouterr().err


@pytest.mark.exhaustive
async def test_ctrl_c_prints_the_measurement_so_far(tmp_path: Path) -> None:
    fates: Any = lambda number: "" if number < 2 else "hang"  # noqa: E731
    path = tmp_path / "out.json"
    async with FakeOpenAI(fail=fates).serving() as server:
        arguments = ("--url", server.url, "--concurrency", "1", "--warmup", "0", "--json", str(path))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import signal, infd.admin.ctl\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
            f"infd.admin.ctl.main(['bench', *{arguments}])",
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
        )
        await server.hanging.wait()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()

    assert process.returncode == 128 + signal.SIGINT
    assert "2 done, 0 failed, 1 unfinished, interrupted" in out.decode()
    assert json.loads(path.read_text())["runs"][0]["interrupted"] is True
