"""Operators and clients race on the embedded model: every answer is complete, correct and its own client's.

Several operators at a time pause, sleep, wake, swap weights, switch adapters, reset the prefix cache and abort, while
clients send requests, read and disconnect. transformers and PEFT computed all permitted answers beforehand, so the test
detects an answer that mixes two adapters, two sets of weights or two requests, and a reused page of other weights.
`make soak` runs the ten thousand of SAFETY.md; the seed is printed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import threading
import warnings
from collections import Counter
from contextlib import suppress
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec import Struct

from infd import embedded
from infd.adapters.reading import HostWeights
from infd.config import (
    CacheConfig,
    Config,
    DeviceConfig,
    LiveConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)
from infd.drafting.select import drafting
from infd.engine.engine import Engine
from infd.engine.lifecycle.state import State
from infd.errors import (
    Aborted,
    AdapterTooLarge,
    Busy,
    CheckpointError,
    ModelNotFound,
    NotReady,
    Overtaken,
    WrongState,
)
from infd.executors.local import LocalExecutor
from infd.kernels.families.adapters import LowRank
from infd.memory import ALL, Memory, MemoryPart
from infd.request import FinishReason, Generate, Request, SamplingParams
from infd.runner.arenas.arena import Arena
from infd.telemetry.metrics import Metrics
from infd.text.chat import ChatTemplate
from infd.text.tokenizer import Tokenizer
from tests.engine.driving import nothing_is_left, running
from tests.tiny import continuation, oracle

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path
    from typing import Literal

    from infd.engine.lifecycle.target import Mode, Transition

    Speculative = Literal["off", "ngram", "suffix"]

RACES = 10_000 if os.environ.get("INFD_SOAK") else 100
SEED = int(os.environ.get("INFD_TEST_SEED", "1"))
NEW = 12
SAID = ("What is infd?", "What is the capital of France?", "Which port does infd listen on?", "Tell me a story.")
ADAPTERS = ("capitals", "pirate")  # of the directories that ship; any of them may be served under either's name
MODES: tuple[Mode, ...] = ("abort", "wait", "keep")


def perturbed(directory: Path) -> Path:
    """Save weights of equal shapes with other answers."""
    model = oracle(embedded.path())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "mlp" in name:
                tensor.mul_(1 + torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


class World(Struct):
    """Checkpoints, prompts, and the expected answers by checkpoint, adapter (None: no adapter) and prompt."""

    checkpoints: dict[str, Path]
    prompts: list[list[int]]
    answers: dict[tuple[str, str | None, int], list[int]]

    def longest(self, prompt: int) -> int:
        """Return how many tokens of a prompt's answer have a clear margin with every checkpoint and adapter."""
        return min(len(answer) for (_, _, number), answer in self.answers.items() if number == prompt)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    from peft import PeftModel

    root = tmp_path_factory.mktemp("weights")
    checkpoints = {"shipped": embedded.path(), "other": perturbed(root / "other")}
    (root / "foreign").mkdir()
    shutil.copy(embedded.path() / "config.json", root / "foreign")
    shutil.copy(embedded.draft() / "model.safetensors", root / "foreign")
    tokenizer = Tokenizer.load(embedded.path())
    template = ChatTemplate.load(tokenizer)
    prompts = [tokenizer.encode(template.render([{"role": "user", "content": said}])) for said in SAID]
    answers = {}
    for name, directory in checkpoints.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of transformers
            model = oracle(directory)
            for number, prompt in enumerate(prompts):
                answers[name, None, number] = continuation(model, prompt, NEW)
            for adapter in ADAPTERS:
                adapted: Any = PeftModel.from_pretrained(oracle(directory), str(embedded.adapters() / adapter)).eval()
                for number, prompt in enumerate(prompts):
                    answers[name, adapter, number] = continuation(adapted, prompt, NEW)
    return World(checkpoints, prompts, {key: tokens[:clear] for key, (tokens, clear) in answers.items()})


def engine_over(world: World, depth: int, host_bytes: int, speculative: Speculative) -> Engine:
    """Return an engine whose cache is too small for all concurrent requests.

    host_bytes  for adapters, each of which takes some 700,000
    """
    config = Config(
        model=ModelConfig(
            path=str(embedded.path()),
            dtype="float32",
            max_model_len=128,
            weights_root=str(world.checkpoints["other"].parent),
        ),
        server=ServerConfig(hold_timeout_s=3600.0),
        device=DeviceConfig(kind="cpu", threads=1, depth=depth),
        scheduler=SchedulerConfig(step_tokens=64, max_num_seqs=6, speculative=speculative),
        cache=CacheConfig(bytes=2**20, page_tokens=16),
        lora=LoraConfig(max_adapters=2, max_adapters_per_step=depth, host_bytes=host_bytes),
    )
    return Engine(
        LiveConfig(config),
        LocalExecutor(config),
        Metrics(),
        names=("embedded",),
        drafting=drafting(config.scheduler),
    )


class History:
    """The operations on an engine that its answers depend on.

    weights      the loaded checkpoint
    changes      odd while weights are being changed
    generations  the latest of each adapter's name, and the directory that it was read from
    aborts       how often an operator aborted requests
    """

    def __init__(self, engine: Engine, world: World, chance: random.Random) -> None:
        self.engine, self.world, self.chance = engine, world, chance
        self.weights = "shipped"
        self.changes = 0
        self.latest = dict.fromkeys(ADAPTERS, 0)
        self.read_from: dict[int, str] = {}
        self.aborts = 0
        self.left = 0  # verbs to come
        self.outcomes = Counter[str]()
        self.verbs = Counter[str]()
        self.answered = Counter[tuple[str, str | None]]()

    # Clients

    async def client(self) -> None:
        while self.left > 0:
            if self.chance.random() < 0.8:
                await self.ask()
            else:  # some do not stay for the end, wherever their request is by then
                asking = asyncio.create_task(self.ask())
                await self.a_while()
                asking.cancel()
                with suppress(asyncio.CancelledError):
                    await asking
                    continue
                self.outcomes["cancelled"] += 1

    async def ask(self) -> None:
        name = self.chance.choice([None, *ADAPTERS])
        number = self.chance.randrange(len(self.world.prompts))
        count = self.chance.randrange(2, self.world.longest(number) + 1)
        choices = self.chance.choice([1, 1, 1, 2])
        request = Request(
            id="r",
            prompt=tuple(self.world.prompts[number]),
            wants=(Generate(SamplingParams(max_tokens=count, temperature=0.0)),),
            choices=choices,
            adapter=name,
        )
        aborts = self.aborts
        try:
            async with self.engine.admit(choices, 0) as ticket:
                changes, weights, least = self.changes, self.weights, self.latest.get(name or "", 0)
                reading = await ticket.submit(request)
                adapter = ticket.choices[0].seq.adapter
                read_from = None
                if name is not None:
                    assert adapter is not None
                    assert adapter.name == name
                    assert least <= adapter.generation <= self.latest[name], "a generation that was replaced before"
                    read_from = self.read_from[adapter.generation]
                got: dict[int, list[int]] = {index: [] for index in range(choices)}
                finish: dict[int, FinishReason | None] = {}
                leaves = self.chance.random() < 0.1
                async for index, delta in reading:
                    assert finish.get(index) is None, "something came after the terminal event"
                    got[index] += delta.token_ids
                    finish[index] = delta.finish
                    assert delta.error is None, delta.error
                    if leaves:
                        self.outcomes["left"] += 1
                        return
        except Aborted:
            if self.aborts == aborts:
                raise
            self.outcomes["aborted"] += 1
            return
        except (NotReady, ModelNotFound) as refusal:
            self.outcomes[type(refusal).__name__] += 1
            await asyncio.sleep(0)  # it may have come without a turn of the loop
            return
        assert finish.keys() == got.keys()
        want = self.world.answers[weights, read_from, number][:count]
        steady = changes == self.changes and changes % 2 == 0
        for index, tokens in got.items():
            if finish[index] is FinishReason.ABORT:
                assert self.aborts > aborts, "aborted by no operator"
            else:
                assert (finish[index], len(tokens)) == (FinishReason.LENGTH, count)
            if steady:  # else it was begun with other weights than it ended with
                assert tokens == want[: len(tokens)], f"asked {name} (from {read_from}, weights {weights}) for {number}"
        if steady and FinishReason.ABORT not in finish.values():
            self.answered[weights, read_from] += 1
        self.outcomes["answered"] += 1

    # Operators

    async def operator(self, verbs: dict[Callable[[], Awaitable[None]], int]) -> None:
        while self.left > 0:
            self.left -= 1
            (verb,) = self.chance.choices(list(verbs), list(verbs.values()))
            self.verbs[verb.__name__] += 1
            await verb()
            await self.a_while()

    async def a_while(self) -> None:
        """Yield to other tasks: not at all, for some turns of the loop, or for a few steps of the device."""
        match self.chance.randrange(4):
            case 0:
                return
            case 1 | 2:
                for _ in range(self.chance.randrange(20)):
                    await asyncio.sleep(0)
            case _:
                for _ in range(self.chance.randrange(1, 40)):
                    await self.behind_the_steps()

    async def behind_the_steps(self) -> Any:
        """Wait for the steps issued so far; return the device's state."""
        executor = self.engine.executor
        assert isinstance(executor, LocalExecutor)
        return await executor.between(lambda loaded: loaded)

    async def operate(self, verb: Callable[[], Transition]) -> None:
        """Run a verb, and wait for the end of its transition or not."""
        move = verb()
        if self.chance.random() < 0.5:
            with suppress(Overtaken):
                await move.result()

    async def pause(self) -> None:
        mode = self.chance.choice(MODES)
        self.aborts += mode == "abort"
        await self.operate(lambda: self.engine.control.pause(mode, self.chance.choice(["hold", "hold", "reject"])))

    async def sleep(self) -> None:
        mode, level = self.chance.choice(MODES), self.chance.choice([1, 2])
        self.aborts += mode == "abort"
        await self.operate(lambda: self.engine.control.sleep(mode, level))

    async def wake(self) -> None:
        parts = self.chance.choice([ALL, ALL, frozenset({MemoryPart.WEIGHTS}), frozenset({MemoryPart.CACHE})])
        await self.operate(lambda: self.engine.control.wake(parts))

    async def resume(self) -> None:
        await self.operate(self.engine.control.resume)
        goal = self.outcomes["answered"] + self.chance.randrange(4)
        while self.engine.lifecycle.state is State.READY and self.outcomes["answered"] < goal and self.left > 0:
            await self.behind_the_steps()

    async def load_weights(self) -> None:
        name = self.chance.choice(["shipped", "other", "foreign"])
        root = self.world.checkpoints["other"].parent
        if self.chance.random() < 0.8:
            with suppress(Overtaken):
                await self.engine.control.pause(self.chance.choice(["wait", "keep"])).result()
        try:
            move = self.engine.control.load_weights(str(self.world.checkpoints.get(name, root / name)))
        except Busy:
            return
        self.changes += 1
        try:
            await move.result()
            assert name != "foreign", "another model's weights were taken"
            self.weights = name
            self.outcomes["weights changed"] += 1
        except CheckpointError:
            assert name == "foreign"
        except WrongState:
            pass
        self.changes += 1

    async def forget_prefixes(self) -> None:
        self.engine.core.forget_prefixes(preempting=self.chance.random() < 0.5)

    async def abort(self) -> None:
        if rows := self.engine.requests():
            self.aborts += 1
            assert self.engine.abort(self.chance.choice(rows).id)

    async def load_adapter(self) -> None:
        name, path = self.chance.choice(ADAPTERS), self.chance.choice(ADAPTERS)
        try:
            await self.engine.adapters.load(name, str(embedded.adapters() / path), in_place=True)
        except AdapterTooLarge:
            self.outcomes["no room"] += 1
            return
        self.latest[name] = generation = self.engine.adapters.row(name).generation
        self.read_from[generation] = path

    async def unload_adapter(self) -> None:
        name = self.chance.choice(ADAPTERS)
        self.engine.adapters.unload(name)
        if self.chance.random() < 0.3:
            await self.load_adapter()

    async def store_adapters(self) -> None:
        self.engine.adapters.store()

    # From readiness to readiness

    async def run(self, races: int) -> None:
        """Let six clients and three operators race; then every request must be answered."""
        self.left = races
        at_rest = {
            self.pause: 4,
            self.sleep: 4,
            self.wake: 4,
            self.resume: 8,
            self.load_weights: 3,
            self.forget_prefixes: 2,
            self.abort: 1,
        }
        adapted = {self.load_adapter: 6, self.unload_adapter: 2, self.store_adapters: 1, self.forget_prefixes: 1}
        for _ in ADAPTERS:
            await self.load_adapter()
        clients = [asyncio.create_task(self.client()) for _ in range(6)]
        operators = [asyncio.create_task(self.operator(verbs)) for verbs in (at_rest, at_rest, adapted)]
        try:
            await first_failure(operators, clients)
            await self.engine.control.resume().result()
            await first_failure(clients)
        finally:
            for task in (*clients, *operators):
                task.cancel()
            await asyncio.gather(*clients, *operators, return_exceptions=True)

    async def nothing_is_left(self) -> None:
        """Assert that the engine is as before the first request, except for the adapters' generations."""
        engine = self.engine
        for name in ADAPTERS:
            engine.adapters.unload(name)
            await engine.adapters.wait_until_unused(name)
        while engine.core.loop.in_flight:
            await self.behind_the_steps()
        nothing_is_left(engine)
        assert (engine.lifecycle.state, engine.executor.memory) == (State.READY, Memory())
        assert engine.core.scheduler.adapters._slots == {}
        assert (engine.adapters.bytes, engine.adapters.rows()) == (0, [])
        assert len((await self.behind_the_steps()).runner.adapters) == 0, "the device holds an adapter"
        assert engine.core.scheduler.rows.available == engine.core.capacity.rows, "a row leaked"


async def first_failure(awaited: list[asyncio.Task[None]], others: list[asyncio.Task[None]] | None = None) -> None:
    """Return after all `awaited` have ended. Raises the first failure of any task at once."""
    left = set(awaited)
    while left:
        done, _ = await asyncio.wait({*left, *(others or ())} - finished(others), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        left -= done


def finished(tasks: list[asyncio.Task[None]] | None) -> set[asyncio.Task[None]]:
    return {task for task in tasks or () if task.done()}


def held() -> dict[str, int]:
    """Count the resources that a process must not accumulate."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        # After each load a thread collapses the weights into large pages, and then ends.
        "threads": len([thread for thread in threading.enumerate() if thread.name != "infd-collapsing"]),
        "tasks": len(asyncio.all_tasks()),
        **Counter(kind.__name__ for kind in map(type, gc.get_objects()) if kind in {Arena, HostWeights, LowRank}),
    }


def resident_kib() -> Iterator[int]:
    with open("/proc/self/status") as lines:
        yield from (int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize(
    ("depth", "host_bytes", "speculative"),
    [
        (1, 10_000_000, "suffix"),
        (2, 1_000_000, "off"),
        pytest.param(2, 1_000_000, "ngram", marks=pytest.mark.exhaustive),
    ],
)
async def test_verbs_racing_requests_on_the_embedded_model_spoil_no_answer_and_leak_nothing(
    world: World, depth: int, host_bytes: int, speculative: Speculative
):
    assert len({tuple(world.answers[key, name, 0]) for key, name in product(world.checkpoints, (None, *ADAPTERS))}) == 6
    engine = engine_over(world, depth, host_bytes, speculative)
    async with running(engine):
        history = History(engine, world, random.Random(SEED))
        await history.run(10)
        await history.nothing_is_left()
        before, first = held(), next(resident_kib())
        for _ in range(max(1, RACES // 2 // 500)):
            await history.run(min(500, RACES // 2))
            await history.nothing_is_left()
            assert held() == before
            print(f"seed {SEED}, depth {depth}: {history.verbs.total()} verbs, {next(resident_kib())} KiB")
    print(f"{dict(history.outcomes)}\n{dict(history.verbs)}\n{dict(history.answered)}\nresident at first {first} KiB")
    assert history.outcomes["answered"] > RACES // 8
    assert bool(engine.status().drafts) == (speculative != "off")
    if RACES > 100:
        assert all(history.answered[key] for key in product(world.checkpoints, (None, *ADAPTERS)))
    assert not [thread for thread in threading.enumerate() if thread.name == "infd-device"]
