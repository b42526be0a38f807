"""Admin verbs race clients of the `openai` package, on a daemon with the embedded model.

Every answer is correct and complete. `make soak` sends ten times as many verbs.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import pytest

from infd import embedded
from infd.admin.ctl.client import AdminClient, Refused, WrongState
from infd.admin.protocol import Aborted, Dump, LoraChanged, Loras, PrefixCacheReset, Requests, Status, TransitionResult
from tests.e2e.clients import FULL, descriptors, idle_status, resident_kib
from tests.e2e.process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.process import Daemon

    Start = Callable[..., Daemon]

pytestmark = pytest.mark.exhaustive

openai = pytest.importorskip("openai")

VERBS = 300 if FULL else 30
ENOUGH = VERBS // 10  # answers
SEED = int(os.environ.get("INFD_TEST_SEED", "1"))
MODELS = ("embedded", "capitals", "pirate")
QUESTIONS = ("What is infd?", "Which port does infd listen on?", "Tell me a story.")
SETTINGS = (
    *("--device", "cpu", "--dtype", "float32", "--max-model-len", "256", "--kv-cache-bytes", "2M"),
    *("--lora", f"capitals={embedded.adapters() / 'capitals'}", "--lora", f"pirate={embedded.adapters() / 'pirate'}"),
    *("--set", "device.threads=1", "--set", "scheduler.step_tokens=64", "--set", "lora.host_bytes=1000000"),
)
NEW = 12
CLEAR = 1e-2  # a top-2 margin that no order of sums can reverse


class Race:
    """One daemon, its clients and its operators.

    answers   each model's answer to each question without concurrent verbs, up to the first unclear margin
    outcomes  counts of requests by outcome
    verbs     counts of verbs done and overtaken
    """

    def __init__(self, daemon: Daemon, api: openai.AsyncOpenAI) -> None:
        self.answers: dict[tuple[str, str], str] = {}
        self.outcomes = Counter[str]()
        self.verbs = Counter[str]()
        self._admin = AdminClient([str(daemon.admin_socket)], timeout_s=PATIENCE_S)
        self._api = api
        self._chance = random.Random(SEED)
        self._left = VERBS

    async def learn(self) -> None:
        for model in MODELS:
            for question in QUESTIONS:
                answer = await self._api.chat.completions.create(
                    **_asked(model, question), logprobs=True, top_logprobs=2
                )
                scores = answer.choices[0].logprobs
                assert scores is not None
                clear = takewhile(lambda each: _lead(each) > CLEAR, scores.content or ())
                self.answers[model, question] = "".join(each.token for each in clear)
        assert len(set(self.answers.values())) == len(self.answers), "two answers are equal"

    async def client(self) -> None:
        while self._busy:
            model, question = self._chance.choice(MODELS), self._chance.choice(QUESTIONS)
            try:
                finish, text = await (self._whole if self._chance.random() < 0.5 else self._stream)(model, question)
            except openai.APIError as refusal:  # a status, or the last event of a held stream
                if refusal.code not in {"model_not_found", "paused", "sleeping", "aborted"}:
                    raise
                self.outcomes[refusal.code] += 1
                continue
            self.outcomes[str(finish)] += 1
            want = self.answers[model, question]
            if finish in {"abort", None}:
                assert want.startswith(text) or text.startswith(want), (model, question, text)
            else:
                assert text.startswith(want), (model, question, text)

    async def _whole(self, model: str, question: str) -> tuple[str | None, str]:
        answer = await self._api.chat.completions.create(**_asked(model, question))
        assert answer.model == model
        return answer.choices[0].finish_reason, answer.choices[0].message.content or ""

    async def _stream(self, model: str, question: str) -> tuple[str | None, str]:
        """Read a stream to its end, or disconnect early; then the first result is None."""
        finish, text, leaves = None, "", self._chance.random() < 0.2
        async with await self._api.chat.completions.create(**_asked(model, question), stream=True) as stream:
            async for chunk in stream:
                assert chunk.model == model
                for choice in chunk.choices:
                    assert finish is None, "something came after the end"
                    text += choice.delta.content or ""
                    finish = choice.finish_reason
                if leaves and text:
                    return None, text
        assert finish is not None, "a stream without an end"
        return finish, text

    async def operator(self) -> None:
        rest: tuple[Callable[[], Any], ...] = (self._pause, self._sleep, self._wake, *[self._resume] * 4)
        adapters = (self._reload, self._reload, self._unload_and_load)
        while self._busy:
            self._left -= 1
            with suppress(WrongState):  # overtaken, or not at rest
                await self._chance.choice((*rest, *adapters, self._weights, self._forget, self._abort))()

    async def _do(self, verb: str, reply: type[Any], **asked: Any) -> Any:
        self.verbs[verb.partition("/")[0]] += 1
        return await asyncio.to_thread(self._admin.post, f"/v1/{verb}", reply, asked, patient=True)

    async def _move(self, verb: str, **asked: Any) -> None:
        wait_s = self._chance.choice([None, None, 0.0, 0.02])
        await self._do(verb, TransitionResult, wait_s=wait_s, **asked)

    async def _pause(self) -> None:
        new = self._chance.choice(["hold", "hold", "reject"])
        await self._move("pause", mode=self._chance.choice(["abort", "wait", "keep"]), new=new)

    async def _sleep(self) -> None:
        await self._move(
            "sleep", mode=self._chance.choice(["abort", "wait", "keep"]), level=self._chance.choice([1, 2])
        )

    async def _wake(self) -> None:
        await self._move("wake", tags=self._chance.choice([None, ["weights"], ["kv_cache"]]))

    async def _resume(self) -> None:
        """Make the daemon ready for some answers, unless another operator's verb overtakes."""
        await self._move("resume")
        goal = self._answered + self._chance.randrange(6)
        while self._busy and self._answered < goal:
            if (await asyncio.to_thread(self._admin.get, "/v1/status", Status)).state != "ready":
                return

    @property
    def _busy(self) -> bool:
        """Whether verbs remain, or too few answers were completed."""
        return self._left > 0 or self._answered <= ENOUGH

    @property
    def _answered(self) -> int:
        return self.outcomes["length"] + self.outcomes["stop"]

    async def _weights(self) -> None:
        await self._do("pause", TransitionResult, mode="keep")
        await self._do("load-weights", TransitionResult, path=str(embedded.path()))

    async def _forget(self) -> None:
        await self._do("reset-prefix-cache", PrefixCacheReset, running=self._chance.random() < 0.5)

    async def _abort(self) -> None:
        found = await asyncio.to_thread(self._admin.get, "/v1/requests", Requests)
        if found.requests:
            with suppress(Refused):  # the request has already ended
                await self._do(f"requests/{self._chance.choice(found.requests).id}/abort", Aborted)

    async def _reload(self) -> None:
        await self._load(self._chance.choice(MODELS[1:]))

    async def _unload_and_load(self) -> None:
        name = self._chance.choice(MODELS[1:])
        await self._do("loras/unload", LoraChanged, name=name)
        await self._load(name)

    async def _load(self, name: str) -> None:
        with suppress(Refused):  # adapters in use occupy the memory
            await self._do("loras/load", LoraChanged, name=name, path=name, in_place=True)

    async def run(self) -> None:
        """Run until the verbs are done and the clients have finished."""
        async with asyncio.TaskGroup() as clients:
            for _ in range(6):
                clients.create_task(self.client())
            await asyncio.gather(*(self.operator() for _ in range(3)))
            await self._do("resume", TransitionResult)
        for name in MODELS[1:]:
            await self._do("loras/unload", LoraChanged, name=name, wait_s=None)


def _asked(model: str, question: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": NEW,
        "temperature": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": False}},
    }


def _lead(position: Any) -> float:
    first, second = (each.logprob for each in position.top_logprobs)
    lead: float = first - second
    return lead


async def test_verbs_at_the_socket_racing_clients_spoil_no_answer_and_leave_nothing(start_daemon: Start) -> None:
    daemon = await asyncio.to_thread(lambda: start_daemon(*SETTINGS).ready())
    admin = AdminClient([str(daemon.admin_socket)], timeout_s=PATIENCE_S)
    host, port = daemon.address

    def connect() -> openai.AsyncOpenAI:
        url = f"http://{host}:{port}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S * 10)

    async with connect() as api:
        await Race(daemon, api).learn()
    async with connect() as api:
        race = Race(daemon, api)
        await race.learn()
        tasks = len((await asyncio.to_thread(admin.get, "/v1/dump", Dump)).tasks)
        open_before, resident = descriptors(daemon), resident_kib(daemon)
        await race.run()
    status = await asyncio.to_thread(idle_status, daemon)
    print(
        f"seed {SEED}: {dict(race.outcomes)}; {dict(race.verbs)}; resident KiB {resident}, then {resident_kib(daemon)}"
    )

    assert (status.state, status.pages_referenced, status.terminal.get("error", 0)) == ("ready", 0, 0)
    loras = await asyncio.to_thread(admin.get, "/v1/loras", Loras)
    assert (loras.loras, loras.bytes) == ([], 0)
    assert race.outcomes["length"] + race.outcomes["stop"] > ENOUGH
    async with asyncio.timeout(PATIENCE_S):  # disconnects are noticed soon after
        while descriptors(daemon) > open_before:
            await asyncio.sleep(0)
        while len((await asyncio.to_thread(admin.get, "/v1/dump", Dump)).tasks) > tasks:
            pass
    assert "Traceback" not in daemon.log_text()
