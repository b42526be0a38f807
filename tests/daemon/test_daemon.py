"""Behaviour of the daemon that tests with a real process cannot trigger."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import signal
import socket
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest

from infd.config import (
    AdminConfig,
    Config,
    DeviceConfig,
    Environment,
    LiveConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from infd.daemon import components, resolve
from infd.daemon.banner import Readiness, announce_ready, first_request, process_age_s
from infd.daemon.daemon import Daemon
from infd.daemon.heartbeat import Heartbeat, status_line
from infd.daemon.notify import Notifier
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.errors import CheckpointError, ConfigError, DeviceLost, OutOfMemory
from infd.http.schema.chat import ChatRequest
from infd.request import Generate, Request, SamplingParams
from infd.runner.arenas.host import headstart
from infd.telemetry.metrics import Metrics
from tests.executors.faulty import faulty, remote
from tests.fakes import FakeExecutor
from tests.runner import driving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.engine.executor import Executor
    from infd.http.auth import Keys
    from infd.scheduler.plan import StepPlan


BEFORE_LOST = [2]  # a prompt that the fake model answers with 18 tokens and tests.executors.faulty.LOST


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


@pytest.fixture
def notifier(manager: socket.socket) -> Iterator[Notifier]:
    notifier = Notifier(manager.getsockname())
    yield notifier
    notifier.close()


@pytest.fixture(autouse=True)
def _collectable_again() -> Iterator[None]:
    yield
    gc.unfreeze()


def heard(manager: socket.socket) -> list[str]:
    said = []
    while True:
        try:
            said.append(manager.recv(4096).decode())
        except BlockingIOError:
            return said


def daemon_of(tmp_path: Path, executor: Executor, notify: str = "") -> Daemon:
    config = Config(server=ServerConfig(port=0), admin=AdminConfig(socket=str(tmp_path / "admin.sock")))
    return Daemon(config, Environment(notify_socket=notify), executor)


async def test_a_device_without_automatic_sleep_is_reported_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def warnings(sleep_refusal: str, idle_sleep_s: float | None) -> list[str]:
        caplog.clear()
        executor = FakeExecutor()
        executor.sleep_refusal = sleep_refusal
        socket = AdminConfig(socket=str(tmp_path / "admin.sock"))
        config = Config(server=ServerConfig(port=0, idle_sleep_s=idle_sleep_s), admin=socket)
        daemon = Daemon(config, Environment(), executor)
        running = asyncio.ensure_future(daemon.run())
        while daemon.engine.lifecycle.state is not State.READY:
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        await running
        return [record.reason for record in caplog.records if "idle_sleep_s" in record.message]  # type: ignore[attr-defined]

    assert await warnings("memory of cuda:0 is not given back yet", 60.0) == ["memory of cuda:0 is not given back yet"]
    assert not await warnings("memory of cuda:0 is not given back yet", None)
    assert not await warnings("", 60.0)


async def test_a_step_that_does_not_move_stops_the_watchdog(manager: socket.socket, notifier: Notifier) -> None:
    executor = FakeExecutor()
    executor.gate.clear()
    engine = Engine(LiveConfig(Config()), executor, Metrics())
    heartbeat = Heartbeat(engine, executor, notifier, watchdog_s=30.0)
    await engine.load()
    running = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0)

    heartbeat.beat()
    heartbeat.beat()
    assert heard(manager) == ["STATUS=ready · 0 running · 0 waiting · KV 0%", "WATCHDOG=1", "WATCHDOG=1"]

    async with engine.admit(1, 0) as ticket:
        wants = (Generate(SamplingParams(max_tokens=2)),)
        choices = await ticket.submit(Request(id=ticket.id, prompt=(1, 2, 3), wants=wants))
        while not engine.status().running:
            await asyncio.sleep(0)
        heartbeat.beat()
        heartbeat.beat()
        assert not any("WATCHDOG" in said for said in heard(manager)), "a stuck step is not a sign of life"

        executor.gate.set()
        await anext(choices)
        heartbeat.beat()
        assert "WATCHDOG=1" in heard(manager)

    engine.lifecycle.enter(State.FAILED)
    heartbeat.beat()
    assert "WATCHDOG=1" not in heard(manager)
    engine.stop()
    await running
    await engine.close()


async def test_a_frozen_request_does_not_stop_the_watchdog(manager: socket.socket, notifier: Notifier) -> None:
    executor = FakeExecutor()
    engine = Engine(LiveConfig(Config()), executor, Metrics())
    heartbeat = Heartbeat(engine, executor, notifier, watchdog_s=30.0)
    await engine.load()
    running = asyncio.ensure_future(engine.run())
    await asyncio.sleep(0)
    async with engine.admit(1, 0) as ticket:
        sampling = SamplingParams(max_tokens=200)
        choices = await ticket.submit(Request(id=ticket.id, prompt=(1, 2, 3), wants=(Generate(sampling),)))
        await anext(choices)
        await engine.control.pause("keep").result()
        heartbeat.beat()
        heard(manager)
        heartbeat.beat()
        heartbeat.beat()
        assert heard(manager) == ["WATCHDOG=1"] * 2
        assert engine.status().running == 1
    engine.stop()
    await running
    await engine.close()


async def test_status_is_sent_only_when_it_changed(manager: socket.socket, notifier: Notifier) -> None:
    executor = FakeExecutor()
    engine = Engine(LiveConfig(Config()), executor, Metrics())
    heartbeat = Heartbeat(engine, executor, notifier, watchdog_s=None)

    heartbeat.beat()
    engine.lifecycle.enter(State.DRAINING)
    heartbeat.beat()
    heartbeat.beat()

    assert status_line(engine) == "draining"
    assert heard(manager) == ["EXTEND_TIMEOUT_USEC=30000000", "STATUS=starting", "STATUS=draining"]


async def test_it_listens_before_it_has_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loading, loaded = asyncio.Event(), asyncio.Event()

    class Loading(FakeExecutor):
        async def load(self, lost=None):  # type: ignore[no-untyped-def]
            loading.set()
            await loaded.wait()
            return await super().load()

    caplog.set_level(logging.INFO, "infd")
    daemon = daemon_of(tmp_path, Loading())
    running = asyncio.ensure_future(daemon.run())
    await loading.wait()
    url = next(record.address for record in caplog.records if record.message == "listening")
    async with aiohttp.ClientSession(url) as client:
        for path, expected in [("/livez", 200), ("/health", 503), ("/readyz", 503), ("/v1/models", 503)]:
            async with client.get(path) as answer:
                assert answer.status == expected, path
        loaded.set()
        while daemon.engine.lifecycle.state is not State.READY:
            await asyncio.sleep(0.01)
        for path in ("/readyz", "/v1/models"):
            async with client.get(path) as answer:
                assert answer.status == 200, path
    signal.raise_signal(signal.SIGTERM)

    assert await running == 0


async def test_term_during_a_load_that_never_ends_is_a_clean_exit(tmp_path: Path) -> None:
    loading = asyncio.Event()

    class Loading(FakeExecutor):
        async def load(self, lost=None):  # type: ignore[no-untyped-def]
            loading.set()
            await asyncio.Event().wait()

    executor = Loading()
    running = asyncio.ensure_future(daemon_of(tmp_path, executor).run())
    await loading.wait()
    signal.raise_signal(signal.SIGTERM)

    assert await running == 0
    assert executor.closed


async def test_term_during_a_load_that_cannot_be_interrupted_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("infd.daemon.daemon.CLOSING_S", 0.05)
    caplog.set_level(logging.INFO, "infd")
    loading = asyncio.Event()

    class Loading(FakeExecutor):
        async def load(self, lost=None):  # type: ignore[no-untyped-def]
            loading.set()
            await asyncio.Event().wait()

        async def close(self) -> None:
            await asyncio.Event().wait()

    running = asyncio.ensure_future(daemon_of(tmp_path, Loading()).run())
    await loading.wait()
    signal.raise_signal(signal.SIGTERM)

    assert await running == 0
    assert "exits while the model is still being loaded" in caplog.messages
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_the_daemon_fails_with_the_error_of_a_load_that_failed(tmp_path: Path) -> None:
    executor = FakeExecutor()
    executor.load_error = OutOfMemory("the weights need 2 GiB; 1 GiB is free")

    with pytest.raises(OutOfMemory, match="the weights need"):
        await daemon_of(tmp_path, executor).run()
    assert executor.closed
    assert not (tmp_path / "admin.sock").exists()


def loses_its_device() -> FakeExecutor:
    def lose(plan: StepPlan) -> None:
        if plan.number >= 3:
            raise DeviceLost("an uncorrectable error")

    return FakeExecutor(fault=lose)


@pytest.mark.parametrize(
    "make",
    [loses_its_device, lambda: faulty(driving.config()), lambda: remote(driving.config())],
    ids=["fake", "local", "remote"],
)
async def test_a_lost_device_ends_every_stream_with_an_error_and_the_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[], Executor]
) -> None:
    caplog.set_level(logging.INFO, "infd")
    daemon = daemon_of(tmp_path, make())
    running = asyncio.ensure_future(daemon.run())
    while daemon.engine.lifecycle.state is not State.READY:
        await asyncio.sleep(0.01)
    url = next(record.address for record in caplog.records if record.message == "listening")
    body = {"prompt": BEFORE_LOST, "max_tokens": 40, "temperature": 0, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession(url) as client, client.post("/v1/completions", json=body) as answer:
        text = await answer.text()

    with pytest.raises(DeviceLost, match="an uncorrectable error") as lost:
        await running
    assert lost.value.exit_code == os.EX_SOFTWARE == 70
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert "choices" in json.loads(events[0])
    assert "error" in json.loads(events[-2])
    assert events[-1] == "[DONE]"


async def test_a_device_lost_while_no_step_runs_ends_the_daemon(tmp_path: Path) -> None:
    executor = FakeExecutor()
    daemon = daemon_of(tmp_path, executor)
    running = asyncio.ensure_future(daemon.run())
    while daemon.engine.lifecycle.state is not State.READY:
        await asyncio.sleep(0.01)
    assert executor.lost is not None
    executor.lost(DeviceLost("fell off the bus"))

    with pytest.raises(DeviceLost, match="fell off the bus"):
        await running


async def test_nothing_is_left_running(tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    daemon = daemon_of(tmp_path, FakeExecutor())
    running = asyncio.ensure_future(daemon.run())
    while daemon.engine.lifecycle.state is not State.READY:
        await asyncio.sleep(0.01)
    signal.raise_signal(signal.SIGINT)
    assert await running == 0
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == before


def test_a_model_is_a_directory_or_the_embedded_one(tmp_path: Path) -> None:
    def model(path: str) -> Config:
        return Config(model=ModelConfig(path=path))

    assert (resolve.checkpoint(model("embedded")) / "tokenizer.json").is_file()
    assert resolve.checkpoint(model(str(tmp_path))) == tmp_path
    with pytest.raises(CheckpointError, match="--model takes a checkpoint directory"):
        resolve.checkpoint(model(str(tmp_path / "missing")))


def test_a_model_may_be_a_gguf_file_or_a_directory_with_one(tmp_path: Path) -> None:
    def found(path: Path) -> Path | None:
        return resolve.checkpoint(Config(model=ModelConfig(path=str(path))))

    first, second = tmp_path / "a-00001-of-00002.gguf", tmp_path / "a-00002-of-00002.gguf"
    first.touch()
    second.touch()
    assert found(first) == found(tmp_path) == first
    (tmp_path / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files: name one of a-00001-of-00002\.gguf, b\.gguf"):
        found(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert found(tmp_path) == tmp_path, "safetensors come before GGUF"
    with pytest.raises(CheckpointError, match=r"missing\.gguf: No such file"):
        found(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match=r"org/name\.gguf: No such file"):
        found(Path("org/name.gguf"))
    assert found(Path("org/name:Q4_K_M")) is None


def test_a_model_is_known_by_its_directory_unless_named() -> None:
    assert resolve.served_names(Config()) == ("embedded",)
    assert resolve.served_names(Config(model=ModelConfig(path="/models/tiny/"))) == ("tiny",)
    assert resolve.served_names(Config(model=ModelConfig(path="/models/tiny", served_names=("a", "b")))) == ("a", "b")
    assert resolve.served_names(Config(model=ModelConfig(path="org/tiny"))) == ("org/tiny",)
    assert resolve.served_names(Config(model=ModelConfig(path="org/tiny:Q8_0"))) == ("org/tiny:Q8_0",)
    assert resolve.served_names(Config(model=ModelConfig(path="/models/tiny-Q8_0.gguf"))) == ("tiny-Q8_0",)
    assert resolve.served_names(Config(model=ModelConfig(path="/m/tiny-00001-of-00002.gguf"))) == ("tiny",)


def test_a_directory_comes_before_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config(model=ModelConfig(path="org/tiny"))
    assert resolve.checkpoint(config) is None

    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert resolve.checkpoint(config) == Path("org/tiny")
    assert resolve.served_names(config) == ("tiny",)
    with pytest.raises(ConfigError, match=r"model\.revision is for models of a hub"):
        resolve.checkpoint(Config(model=ModelConfig(path="org/tiny", revision="v1")))


async def test_the_null_device_needs_to_know_sizes(tmp_path: Path) -> None:
    null = Config(device=DeviceConfig(kind="null"), scheduler=SchedulerConfig(max_num_seqs=1))
    directory: Future[Path] = Future()
    executor = components.executor(null, Environment(), directory, lambda done, total: None)
    directory.set_result(tmp_path)

    with pytest.raises(CheckpointError, match=r"config\.json"):
        await executor.load()


def test_keys_come_from_a_file_or_from_the_environment(tmp_path: Path) -> None:
    def keys(environment: Environment, path: str = "") -> Keys:
        return resolve.keys(Config(server=ServerConfig(api_key_file=path)), environment)

    (tmp_path / "keys").write_text("ann:" + "0" * 64 + "\n")
    assert len(keys(Environment())) == 0
    assert len(keys(Environment(api_key="secret"))) == 1
    assert len(keys(Environment(), str(tmp_path / "keys"))) == 1
    with pytest.raises(ConfigError, match="cannot be read"):
        keys(Environment(), str(tmp_path / "missing"))


def readiness(model: str, url: str, *, key: bool = False, embedded: bool = False) -> Readiness:
    return Readiness(model, "cpu", "float32", (url,), url, "/run/a.sock", 1.0, key, embedded)


def test_the_banners_command_is_a_valid_request() -> None:
    ready = readiness("it's mine", "http://127.0.0.1:8000", key=True)
    command = first_request(ready)
    program, url, *options = shlex.split(command.replace("\\\n", ""))

    assert max(map(len, command.splitlines())) < 80
    assert (program, url) == ("curl", "http://127.0.0.1:8000/v1/chat/completions")
    assert options[:4] == ["-H", "Content-Type: application/json", "-H", "Authorization: Bearer YOUR_KEY"]
    request = msgspec.json.decode(options[5], type=ChatRequest)
    assert (request.model, request.max_tokens) == ("it's mine", 32)


def test_a_terminal_gets_the_greeting_and_a_program_one_line(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "infd")
    ready = readiness("tiny", "http://127.0.0.1:8000")

    announce_ready(ready, banner=True)
    assert not caplog.records
    assert "curl http://127.0.0.1:8000" in capsys.readouterr().err

    announce_ready(ready, banner=False)
    assert [record.address for record in caplog.records] == ["http://127.0.0.1:8000"]  # type: ignore[attr-defined]
    assert capsys.readouterr().err == ""


def test_the_greeting_names_reduced_limits(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "infd")
    plain = readiness("tiny", "http://127.0.0.1:8000")
    small = msgspec.structs.replace(plain, quantization="int4", vocabulary="int8", cache_dtype="int8")
    for ready, line in ((plain, "cpu, float32"), (small, "cpu, float32, weights int4, vocabulary int8, cache int8")):
        announce_ready(ready, banner=True)
        (device,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("device"))
        assert device.removeprefix("device").strip() == line
        announce_ready(ready, banner=False)
    told = caplog.records[-1]
    assert (told.dtype, told.weights) == ("float32", "int4")  # type: ignore[attr-defined]
    assert (told.vocabulary, told.cache) == ("int8", "int8")  # type: ignore[attr-defined]
    assert not hasattr(caplog.records[0], "weights")


def test_the_banners_command_finds_a_unix_socket() -> None:
    command = first_request(readiness("tiny", "unix:/run/a.http"))

    assert command.startswith("curl --unix-socket /run/a.http http://localhost/v1/chat/completions ")


def test_the_greeting_names_the_embedded_model(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "infd")
    for embedded in (False, True):
        ready = readiness("tiny", "http://127.0.0.1:8000", embedded=embedded)
        announce_ready(ready, banner=True)
        assert ("ships with infd" in capsys.readouterr().err) is embedded
        announce_ready(ready, banner=False)
        assert hasattr(caplog.records[-1], "note") is embedded


async def test_a_public_address_without_a_key_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def warnings(host: str, **variables: str) -> list[str]:
        caplog.clear()
        socket = AdminConfig(socket=str(tmp_path / "admin.sock"))
        config = Config(server=ServerConfig(port=0, host=(host,)), admin=socket)
        daemon = Daemon(config, Environment(**variables), FakeExecutor())  # type: ignore[arg-type]
        running = asyncio.ensure_future(daemon.run())
        while daemon.engine.lifecycle.state is not State.READY:
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGTERM)
        await running
        return [record.address for record in caplog.records if "key" in record.message]  # type: ignore[attr-defined]

    (told,) = await warnings("0.0.0.0")
    assert told.startswith("http://0.0.0.0:")
    assert not await warnings("127.0.0.1")
    assert not await warnings("0.0.0.0", api_key="secret")


def test_a_process_knows_its_age() -> None:
    first = process_age_s()

    assert 0 < first <= process_age_s()


@pytest.mark.parametrize(
    ("kind", "quantization", "mib", "expected_mib"),
    [("cpu", "none", 128, 128), ("cpu", "int8", 256, 128), ("cpu", "none", 8, None), ("cuda:1", "none", 128, None)],
)
def test_memory_is_preallocated_only_for_large_weights_in_host_memory(
    tmp_path: Path, kind: str, quantization: str, mib: int, expected_mib: int | None
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(mib * 2**20)
    settings = Config(model=ModelConfig(path=str(tmp_path), quantization=quantization), device=DeviceConfig(kind=kind))
    ahead = headstart(settings)
    if ahead is None:
        assert expected_mib is None
        return
    ahead.wait()
    held = ahead.populated
    ahead.claim(0)
    assert expected_mib is not None
    assert 0 <= held - expected_mib * 2**20 < 2**21


def test_an_unreadable_weight_file_is_left_to_the_loader(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "nowhere")
    assert headstart(Config(model=ModelConfig(path=str(tmp_path)), device=DeviceConfig(kind="cpu"))) is None
