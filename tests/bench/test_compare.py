from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import pytest
from bandwidth import MemoryProbe
from click.testing import CliRunner
from compare import main
from comparison import Plan, Refused, Report, Server, Started, Window, compare
from server_process import ServerProcess, free_port
from workloads import Background, Workload

from infd.loadgen.figures import Measured, summarise
from infd.loadgen.settings import Settings
from tests.bench.fake_server import FakeOpenAI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} -m tests.bench.fake_server $port"
SMALL = Workload(name="small", figures=("output", "ttft"), requests=2, concurrency=2, input_tokens=40, output_tokens=3)
OTHER = Workload(name="other", figures=("stream",), requests=1, input_tokens=40, output_tokens=5)
PLAN = Plan(model="m", rounds=2, cores=(0,), client_cores=(0,), workloads=(SMALL, OTHER))


def _steady() -> float:
    return 40.0


async def contest(
    logs: Path,
    *fakes: FakeOpenAI,
    plan: Plan = PLAN,
    gb_s: Callable[[], float] = _steady,
    tell: Any = lambda text: None,
) -> Report:
    """Compare fake servers named a, b, ..."""
    async with AsyncExitStack() as stack:
        servers = []
        for name, fake in zip("abc", fakes, strict=False):
            await stack.enter_async_context(fake.serving())
            servers.append(Server(name=name, url=fake.url))
        return await compare(plan, tuple(servers), gb_s, logs, tell=tell)


async def test_each_round_takes_each_workload_to_every_server_and_turns_the_order(tmp_path: Path) -> None:
    report = await contest(tmp_path, FakeOpenAI(), FakeOpenAI())

    assert [(window.round, window.workload, window.server) for window in report.windows] == [
        (0, "small", "a"),
        (0, "small", "b"),
        (0, "other", "a"),
        (0, "other", "b"),
        (1, "small", "b"),
        (1, "small", "a"),
        (1, "other", "b"),
        (1, "other", "a"),
    ]
    assert {(ratio.workload, ratio.figure, ratio.peer, ratio.pairs) for ratio in report.ratios} == {
        ("small", "output", "b", 2),
        ("small", "ttft", "b", 2),
        ("other", "stream", "b", 2),
    }


async def test_all_servers_get_the_same_load_and_no_prompt_repeats(tmp_path: Path) -> None:
    first, second = FakeOpenAI(), FakeOpenAI()
    await contest(tmp_path, first, second)

    prompts = sorted(body["prompt"] for body in first.bodies)
    assert prompts == sorted(body["prompt"] for body in second.bodies)
    assert len(set(prompts)) == len(prompts)
    assert len({prompt[:40] for prompt in prompts}) == len(prompts)  # no two share a prefix
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in first.bodies)


async def test_a_window_beside_a_slow_memory_is_thrown_away_and_repeated(tmp_path: Path) -> None:
    rates: Iterator[float] = iter([40.0] * 9 + [40.0, 20.0] + [40.0] * 100)
    report = await contest(tmp_path, FakeOpenAI(), FakeOpenAI(), gb_s=lambda: next(rates))

    thrown, again, *others = report.windows
    assert (thrown.good, thrown.gb_s) == (False, (40.0, 20.0))
    assert (again.good, again.round, again.server, again.workload) == (True, 0, "a", "small")
    assert thrown.measured.settings.seed != again.measured.settings.seed
    assert all(window.good for window in others)
    assert report.median("a", "small", "ttft") == pytest.approx(
        sum(w.figures["ttft"] for w in report.windows if w.good and w.server == "a" and w.workload == "small") / 2
    )


async def test_no_round_begins_once_the_minutes_are_over(tmp_path: Path) -> None:
    report = await contest(tmp_path, FakeOpenAI(), FakeOpenAI(), plan=msgspec.structs.replace(PLAN, minutes=0.0))

    assert {window.round for window in report.windows} == {0}


async def test_a_machine_that_is_never_quiet_gives_no_ratio(tmp_path: Path) -> None:
    rates: Iterator[float] = iter([40.0] * 9)
    report = await contest(tmp_path, FakeOpenAI(), FakeOpenAI(), gb_s=lambda: next(rates, 20.0))

    assert len(report.windows) == PLAN.rounds * 2 * 2 * PLAN.tries
    assert report.ratios == []
    assert report.median("a", "small", "ttft") is None


async def test_a_server_whose_answers_are_shorter_is_left_out(tmp_path: Path) -> None:
    def late(number: int) -> str:
        return "short" if number == 1 + SMALL.requests else ""  # in `other`, after the trial and `small`

    told: list[str] = []
    report = await contest(tmp_path, FakeOpenAI(), FakeOpenAI(fail=late), FakeOpenAI(), tell=told.append)

    assert list(report.refused) == ["b"]
    assert "4 tokens came where 5 were asked for" in report.refused["b"]
    assert {window.workload for window in report.windows if window.server == "b"} == {"small"}
    assert {ratio.peer for ratio in report.ratios if ratio.workload == "other"} == {"c"}
    assert any("b is left out" in line for line in told)


async def test_without_the_first_server_there_is_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a: trial: 1 of 1 requests failed: 1 times http 429"):
        await contest(tmp_path, FakeOpenAI(fail=lambda number: "refuse"), FakeOpenAI())


async def test_prompts_of_another_length_are_refused(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, workloads=(msgspec.structs.replace(SMALL, input_tokens=3),))
    with pytest.raises(Refused, match="it read prompts of 12 tokens where 3 were meant"):
        await contest(tmp_path, FakeOpenAI(), FakeOpenAI(), plan=plan)


async def test_encoders_are_compared_by_whole_answers_while_others_are_in_flight(tmp_path: Path) -> None:
    short = Workload(
        name="short",
        task="embed",
        figures=("answer", "answer_p99", "requests"),
        requests=3,
        input_tokens=20,
        beside=Background(concurrency=2, input_tokens=130),
    )
    plan = msgspec.structs.replace(PLAN, rounds=1, workloads=(short,))
    fakes = FakeOpenAI(pause_s=0.001), FakeOpenAI(pause_s=0.001)
    report = await contest(tmp_path, *fakes, plan=plan)

    for window in report.windows:
        assert window.measured.requests.completed == 3
        assert window.measured.tokens.input == 3 * 20
        assert window.figures.keys() == {"answer", "answer_p99", "requests"}
    for fake in fakes:
        words = [len(body["input"][0].split()) for body in fake.bodies]
        assert words.count(5) == 3  # 10 + 2 * 5 tokens
        measured = [index for index, count in enumerate(words) if count == 5]
        assert 60 in words[: measured[0]]
        assert 60 in words[measured[0] : measured[-1]]
        assert not any("temperature" in body or "max_tokens" in body for body in fake.bodies)


async def test_a_server_that_refuses_requests_beside_the_measured_ones_is_left_out(tmp_path: Path) -> None:
    beside = Workload(
        name="short",
        task="embed",
        figures=("answer",),
        requests=5,
        input_tokens=20,
        beside=Background(concurrency=2, input_tokens=130),
    )
    plan = msgspec.structs.replace(PLAN, rounds=1, workloads=(beside,))
    told: list[str] = []
    failing = FakeOpenAI(pause_s=0.001)
    failing.fail = lambda number: "refuse" if len(failing.bodies[number]["input"][0].split()) == 60 else ""
    fakes = FakeOpenAI(pause_s=0.001), failing, FakeOpenAI(pause_s=0.001)
    report = await contest(tmp_path, *fakes, plan=plan, tell=told.append)

    assert "requests beside the measured ones failed" in report.refused["b"]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (Server(name="b"), "a command or a url"),
        (Server(name="b", command="x", url="http://127.0.0.1:1"), "and not both"),
        (Server(name="b", command="$NO_SUCH_PLACE/server"), r"names \$NO_SUCH_PLACE"),
        (Server(name="b", command="server '"), "cannot be read: No closing quotation"),
        (Server(name="b", command="/no/such/program"), "exited with 127"),
        (Server(name="b", command=f"{sys.executable} -c 'print(99); raise SystemExit(3)'"), "exited with 3"),
    ],
)
async def test_a_server_that_cannot_be_started_is_left_out_with_the_reason(
    server: Server, reason: str, tmp_path: Path
) -> None:
    told: list[str] = []
    plan = msgspec.structs.replace(PLAN, cores=tuple(os.sched_getaffinity(0)))
    async with FakeOpenAI().serving() as fake:
        with pytest.raises(Refused, match=reason):
            await compare(plan, (Server(name="a", url=fake.url), server), _steady, tmp_path, tell=told.append)
    if "99" in server.command:
        assert told[-1] == "  b: 99"  # the server's output


def window(number: int, server: str, *, good: bool = True, **figures: float) -> Window:
    return Window(
        round=number,
        server=server,
        workload="small",
        figures=figures,
        gb_s=(40.0, 44.0),
        client_cpu=0.1,
        good=good,
        measured=summarise(Settings(url="u"), "m", "", Measured(duration_s=1.0)),
    )


def test_a_ratio_is_of_good_windows_of_one_round_and_above_one_where_the_first_is_ahead() -> None:
    servers = [Server(name=name, url="u", weights_gb=weights) for name, weights in (("a", 0.5), ("b", None))]
    report = Report(
        plan=PLAN,
        machine="",
        gb_s=40.0,
        started=[Started(server=server, ready_s=0.0, resident_bytes=0) for server in servers],
        windows=[
            window(0, "a", output=30.0, ttft=10.0, stream=42.0),
            window(0, "b", output=20.0, ttft=20.0),
            window(1, "b", output=10.0, ttft=40.0),
            window(1, "a", output=40.0, ttft=10.0),
            window(2, "a", good=False, output=1.0, ttft=99.0),
            window(2, "b", output=20.0, ttft=20.0),
        ],
    )
    report.sum_up()

    output, ttft = report.ratios
    assert (output.figure, output.peer, output.pairs) == ("output", "b", 2)
    assert (output.least, output.median, output.most) == (1.5, 2.75, 4.0)
    assert (ttft.least, ttft.median, ttft.most) == (2.0, 3.0, 4.0)
    assert report.median("b", "small", "ttft") == 20.0
    assert report.share_of_memory(servers[0], "small") == pytest.approx(42.0 * 0.5 / 42.0)
    assert report.share_of_memory(servers[1], "small") is None


async def test_a_frozen_server_uses_no_processor_until_it_is_thawed() -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.fake_server", str(port)]
    async with ServerProcess("fake", command, port, ready="/v1/models", environment=_path()) as server:
        assert server.resident_bytes() > 2**20
        server.freeze()
        os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222 - returns once the server is frozen
        spent = server.cpu_s()
        async with aiohttp.ClientSession() as session:
            asked = asyncio.create_task(session.get(f"{server.url}/v1/models"))
            await asyncio.sleep(0)
            assert server.cpu_s() == spent
            server.thaw()
            async with await asked as answer:
                assert answer.status == 200


async def test_a_servers_children_run_on_its_cores_and_end_with_it(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    program = (
        "import os, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, *os.sched_getaffinity(child.pid), os.environ['WORD'], flush=True);"
        "raise SystemExit(4)"
    )
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match="exited with 4"):
        async with ServerProcess(
            "p", [sys.executable, "-c", program], 1, cores=[core], environment={"WORD": "w"}, log=log
        ):
            pass
    child, *rest = log.read_text().split()
    assert rest == [str(core), "w"]
    state = Path(f"/proc/{child}/stat")
    with suppress(FileNotFoundError):
        while state.read_text().rpartition(")")[2].split()[0] != "Z":  # noqa: ASYNC240
            await asyncio.sleep(0)  # killed, not yet a zombie


def test_the_memory_is_read_by_a_thread_on_each_core() -> None:
    cores = os.sched_getaffinity(0)
    with MemoryProbe(cores) as probe:
        assert probe.gb_s() > 0
    assert os.sched_getaffinity(0) == cores


def _path() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def compare_command(*options: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench/compare.py"), *options],
        capture_output=True,
        text=True,
        env={**os.environ, **_path()},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.exhaustive
def test_the_command_starts_servers_and_writes_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "servers.toml"
    file.write_text(
        f"""
        [[server]]
        name = "one"
        command = "{FAKE}"
        weights_gb = 1.0
        [[workload]]
        name = "tiny"
        figures = ["stream", "output"]
        requests = 2
        input_tokens = 40
        output_tokens = 4
        """
    )
    kept = tmp_path / "report.json"
    code, out, err = compare_command(
        *("--model", str(tmp_path), "--servers", str(file), "--server", f"two={FAKE}"),
        *("--rounds", "1", "--tolerance", "1000", "--json", str(kept)),
    )

    assert code == 0, err
    report = msgspec.json.decode(kept.read_bytes())
    assert [started["server"]["name"] for started in report["started"]] == ["one", "two"]
    assert all(started["ready_s"] > 0 and started["resident_bytes"] > 2**20 for started in report["started"])
    assert [window["measured"]["tokens"]["output"] for window in report["windows"]] == [8, 8]
    assert [(ratio["peer"], ratio["pairs"]) for ratio in report["ratios"]] == [("two", 1)] * 2
    for shown in ("MEDIANS", "of the memory's rate", "one IS BETTER BY", "resident, idle"):
        assert shown in out
    assert "round 1, tiny, two" in err


@pytest.mark.exhaustive
def test_a_comparison_that_is_ended_ends_its_servers(tmp_path: Path) -> None:
    log = tmp_path / "one.log"
    waiting = f"{sys.executable} -c 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'"
    command = [sys.executable, str(ROOT / "bench/compare.py"), "--model", ".", "--logs", str(tmp_path)]
    with subprocess.Popen(
        [*command, "--server", f"one={waiting}", "--server", "two=true"],
        env={**os.environ, **_path()},
        stderr=subprocess.DEVNULL,
    ) as process:
        while not (log.exists() and log.read_text().endswith("\n")):
            assert process.poll() is None
            os.sched_yield()
        process.terminate()
        assert process.wait() == 1
    assert not Path(f"/proc/{log.read_text().strip()}").exists()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--server", "one=true"), "it takes two servers"),
        (("--server", "one"), "'one' is not NAME=COMMAND"),
        (("--server", "a=true", "--server", "b=true", "--workload", "x"), "there is no 'x', but decode, prompt-512"),
        (("--server", "a=true", "--server", "b=true", "--cores", "0,x"), "is not a list of numbers"),
        (("--server", "a=true", "--server", "b=true", "--cores", "99999"), "may not run on 99999"),
    ],
)
def test_the_command_names_its_mistake(options: tuple[str, ...], reason: str) -> None:
    done = CliRunner().invoke(main, ["--model", ".", *options])

    assert done.exit_code == 2
    assert reason in done.output
