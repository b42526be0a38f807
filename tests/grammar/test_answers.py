"""Answers of the whole engine to random constraints: each parses and keeps its constraint, and changes no neighbour.

Real scheduler, step loop, device thread, sampler and grammars, at temperature 1.5, with one and two steps in flight, in
a cache small enough that sequences are preempted. Each round mixes constrained requests, some of whose matchers are
made to fail, with unconstrained ones, which are then computed again alone. Models: the embedded one, and random ones
with made-up vocabularies. An answer that max_tokens cuts is finished along a shortest path, and must be valid then too.
An answer without a found end fails the test, also where the lexer of a client's Lark may leave none, because it takes
the longest terminal (`ALONE`).

INFD_SOAK=1 runs 6,000 constraints with llguidance and 4,000 with xgrammar, in ten parts: `-k part3` runs a tenth.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from msgspec import Struct

from infd import embedded
from infd.apart.client import Worker
from infd.config import CacheConfig, Config, DeviceConfig, LiveConfig, ModelConfig, SchedulerConfig
from infd.daemon.components import Language
from infd.engine.engine import Engine
from infd.errors import GrammarFailed, RequestFailed
from infd.executors.local import LocalExecutor, build_runner
from infd.grammar.service import GrammarService
from infd.models.base import PageTensor
from infd.offload import Offload
from infd.request import FinishReason, Generate, Request, SamplingParams
from infd.scheduler.layout import CacheLayout, PageGroup
from infd.telemetry.metrics import Metrics
from tests.engine.driving import nothing_is_left, running
from tests.grammar import engines, vocabularies
from tests.grammar.finishing import ALONE, Finisher
from tests.grammar.random_constraints import Case, draw_case
from tests.runner.driving import load
from tests.runner.fake_model import FakeModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from infd.constraint import Constraint
    from infd.grammar.protocol import Grammar, Matcher, Vocabulary
    from infd.models.base import Batch, PassAdapters
    from infd.runner.pulse import Pulse
    from infd.runner.start.assembly import Loaded

MODELS = ("embedded", "byte_level", "sentencepiece", "large")
SHARES = MappingProxyType({"embedded": 0.2, "byte_level": 0.35, "sentencepiece": 0.35, "large": 0.1})
TOTALS = MappingProxyType({"llguidance": 6000, "xgrammar": 4000})  # constraints of a soak
PARTS = 10 if os.environ.get("INFD_SOAK") == "1" else 1
ROUND = 32  # most constraints computed together
MAX_LEN = 640
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"</", b";")


class BiasedModel(FakeModel):
    """Logits drawn by hash of token and position; those of ends and closing marks grow with the position."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocab_size = vocabulary.columns
        table = torch.randn(31, vocabulary.columns, generator=torch.Generator().manual_seed(5)) * 3.0
        self._table = table
        self._closing = torch.zeros(vocabulary.columns)
        for token, piece in enumerate(vocabulary.tokens):
            if token in vocabulary.end_ids:
                self._closing[token] = 1.0
            elif piece.strip() in CLOSERS:
                self._closing[token] = 0.6

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        return CacheLayout((PageGroup(layers=(0,), page_tokens=page_tokens),))

    def page_tensors(self, page_tokens: int) -> Sequence[PageTensor]:
        return [PageTensor(name, (1, page_tokens, 8), torch.float32) for name in ("k", "v")]

    def forward(self, batch: Batch) -> Tensor:
        hidden = torch.stack([batch.tokens.float(), batch.positions.float()], 1)
        return hidden if batch.sampled is None else hidden[batch.sampled.tokens]

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        token, position = hidden[:, 0].long(), hidden[:, 1].long()
        return self._table[(token * 7 + position * 11) % 31] + (4 + position[:, None] * 0.3) * self._closing


class FailingMatcher:
    unmasked = 0

    def __init__(self, matcher: Matcher, after: int, unexpected: bool) -> None:
        self.inner = matcher
        self._left = after
        self._unexpected = unexpected

    @property
    def accepting(self) -> bool:
        return self.inner.accepting

    @property
    def stopped(self) -> bool:
        return self.inner.stopped

    def advance(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)
        if self._left <= 0:
            raise ZeroDivisionError if self._unexpected else GrammarFailed("made to fail")
        self.inner.advance(tokens)


class FailingGrammar:
    unmasked = 0

    def __init__(self, grammar: Grammar, after: int, unexpected: bool) -> None:
        self._grammar = grammar
        self._failing = after, unexpected

    def matcher(self) -> FailingMatcher:
        return FailingMatcher(self._grammar.matcher(), *self._failing)


class Grammars:
    """The daemon's grammars, some of whose matchers fail."""

    def __init__(self, service: GrammarService, vocabulary: Vocabulary) -> None:
        self.service = service
        self.vocabulary = vocabulary
        self.failing: dict[Constraint, tuple[int, bool]] = {}
        self.run = service.run

    async def compile(self, constraint: Constraint) -> Any:
        grammar = await self.service.compile(constraint)
        failing = self.failing.get(constraint)
        return grammar if failing is None else FailingGrammar(grammar, *failing)

    def fill(self, matchers: Sequence[Any], rows: NDArray[np.int32]) -> list[GrammarFailed | None]:
        return self.service.fill([getattr(each, "inner", each) for each in matchers], rows)


class Answer(Struct):
    tokens: list[int]
    finish: FinishReason
    error: Exception | None


class Served(Struct):
    """A model to serve: its vocabulary, its settings, and what builds it."""

    vocabulary: Vocabulary
    config: Config
    build: Any
    bias: dict[int, float]


@cache
def embedded_vocabulary() -> Vocabulary:
    language = Language.load(embedded.path(), Config(), Worker("infd.text.apart"))
    spelled = language.tokenizer.spellings()
    assert spelled is not None

    class Sizes:
        vocab_size = 3072

    vocabulary = language.vocabulary(Sizes)  # type: ignore[arg-type]
    assert vocabulary is not None
    return vocabulary


def served(kind: str) -> Served:
    scheduler = SchedulerConfig(max_num_seqs=12, step_tokens=64)
    if kind == "embedded":
        vocabulary = embedded_vocabulary()
        model = ModelConfig(path=str(embedded.path()), max_model_len=MAX_LEN, dtype="float32")
        device = DeviceConfig(kind="cpu", threads=1, kernel_cache="")
        config = Config(model=model, device=device, scheduler=scheduler, cache=CacheConfig(bytes=1024 * 4096))
        bias = dict.fromkeys(vocabulary.end_ids, 12.0)
        bias |= {each: 8.0 for each, piece in enumerate(vocabulary.tokens) if piece in CLOSERS}
        return Served(vocabulary, config, build_runner, bias)
    vocabulary = getattr(vocabularies, kind)(3)
    device = DeviceConfig(kind="cpu", threads=1)
    config = Config(device=device, scheduler=scheduler, cache=CacheConfig(bytes=2**16, page_tokens=4))

    def build(settings: Config, pulse: Pulse) -> Loaded:
        return load(BiasedModel(vocabulary), settings, pulse, max_len=MAX_LEN)

    return Served(vocabulary, config, build, {})


def sampling(draw: random.Random, bias: dict[int, float], most: int) -> SamplingParams:
    rare: dict[str, Any] = {
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "min_tokens": 5,
        "logprobs": 2,
    }
    chosen = {name: rare[name] for name in rare if draw.random() < 0.06}
    return SamplingParams(
        max_tokens=draw.choice([most] * 9 + [20]),
        temperature=1.5,
        seed=draw.randrange(2**31),
        logit_bias=bias if draw.random() < 0.95 else {},
        **chosen,
    )


async def answers(engine: Engine, request: Request) -> list[Answer]:
    found = [Answer([], FinishReason.ABORT, None) for _ in range(request.choices)]
    async with engine.admit(request.choices, 0) as ticket:
        async for index, delta in await ticket.submit(request):
            found[index].tokens += delta.token_ids
            if delta.finish is not None:
                found[index].finish, found[index].error = delta.finish, delta.error
    return found


def spelled(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    text = b"".join(vocabulary.tokens[token] for token in tokens if token not in vocabulary.end_ids)
    return text.removeprefix(b" ") if vocabulary.drop_space else text


class Proof:
    """Serves rounds of random requests, and counts.

    found       outcomes by name
    wrong       broken promises: constraint, answer, reason
    unfinished  cut answers of which the search found no end: constraint, answer
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.found: Counter[str] = Counter()
        self.wrong: list[tuple[str, str, str]] = []
        self.unfinished: list[tuple[str, str]] = []
        self._kind = kind
        self._draw = random.Random(f"{kind} {seed}")
        self._finisher = Finisher()

    async def run(self, constraints: int, depth: int) -> None:
        target, metrics, offload = served(self._kind), Metrics(), Offload()
        config = target.config
        service = GrammarService(engines.config(), offload, engines.trial(), metrics)
        service.serve(lambda: target.vocabulary)
        grammars = Grammars(service, target.vocabulary)
        device = DeviceConfig(kind="cpu", threads=1, depth=depth, kernel_cache=config.device.kernel_cache)
        config = Config(model=config.model, device=device, scheduler=config.scheduler, cache=config.cache)
        engine = Engine(LiveConfig(config), LocalExecutor(config, target.build), metrics, grammars=grammars)
        try:
            async with running(engine):
                for begun in range(0, constraints, ROUND):
                    await self._round(engine, grammars, target, min(ROUND, constraints - begun))
                self.found["preemptions"] += engine.core.scheduler.preemptions
            nothing_is_left(engine)
        finally:
            service.close()
            offload.close()

    async def _round(self, engine: Engine, grammars: Grammars, target: Served, constraints: int) -> None:
        draw = self._draw
        cases = [draw_case(draw) for _ in range(constraints)]
        failing = [case.constraint for case in cases if draw.random() < 0.04]
        grammars.failing = {each: (draw.randint(1, 9), draw.random() < 0.5) for each in failing}

        def request(constraint: Constraint | None, most: int) -> Request:
            prompt = tuple(draw.randrange(200, 500) for _ in range(draw.choice([1, 3, 20])))
            wants = (Generate(sampling(draw, target.bias, most), target.vocabulary.end_ids),)
            choices = draw.choice([1, 1, 1, 2, 3])
            return Request(id="r", prompt=prompt, wants=wants, choices=choices, constraint=constraint)

        asked = [request(case.constraint, case.tokens) for case in cases]
        neighbours = [request(None, 60) for _ in range(6)]
        outcomes = await asyncio.gather(*(answers(engine, r) for r in (*asked, *neighbours)), return_exceptions=True)
        for case, outcome in zip(cases, outcomes, strict=False):
            self.found["constraints"] += 1
            if isinstance(outcome, GrammarFailed):
                self.found["refused"] += 1
                self.found[f"refused {type(case.constraint).__name__}"] += 1
            elif isinstance(outcome, BaseException):
                self._wrong(case, "", f"not a refusal: {outcome!r}")
            else:
                broken = case.constraint in grammars.failing
                await asyncio.to_thread(self._check, case, outcome, target.vocabulary, broken)
        for outcome in outcomes[constraints:]:
            self.found["neighbours"] += 1
            if isinstance(outcome, BaseException):
                self.wrong.append(("neighbour", "", repr(outcome)))
        alone = await asyncio.gather(*(answers(engine, each) for each in neighbours))
        for asked_alone, together, apart in zip(neighbours, outcomes[constraints:], alone, strict=True):
            if together != apart:
                self.wrong.append(("neighbour", repr(asked_alone), f"{together} differs from {apart}"))

    def _check(self, case: Case, given: list[Answer], vocabulary: Vocabulary, failing: bool) -> None:
        for answer in given:
            text = spelled(vocabulary, answer.tokens)
            shown = text.decode(errors="replace")
            if answer.finish is FinishReason.ERROR:
                expected = failing and isinstance(answer.error, (GrammarFailed, RequestFailed))
                self.found["failed on purpose" if expected else "failed"] += 1
                if not expected:
                    self._wrong(case, shown, f"failed: {answer.error!r}")
                continue
            self.found["finished" if answer.finish is FinishReason.STOP else "cut"] += 1
            try:
                if answer.finish is not FinishReason.STOP:
                    assert answer.finish is FinishReason.LENGTH
                    rest = self._finisher.shortest_end(case.constraint, text, case.words, case.alike)
                    if rest is None:
                        self.unfinished.append((repr(case.constraint), shown))
                        continue
                    text += rest
                    shown = text.decode(errors="replace")
                case.judge(text.decode())
            except Exception as error:
                self._wrong(case, shown, f"{answer.finish.value}: {type(error).__name__}: {str(error)[:300]}")

    def _wrong(self, case: Case, text: str, reason: str) -> None:
        self.found["wrong"] += 1
        self.wrong.append((repr(case.constraint), text, reason))

    def check(self) -> None:
        ends = dict(self._finisher.found)
        print(
            engines.PRESENT.get(),
            self._kind,
            dict(sorted(self.found.items())),
            ends,
            "unfinished",
            self.unfinished,
            self._finisher.alone,
        )
        assert not self.wrong, "\n".join([f"{len(self.wrong)} wrong, such as", *map(str, self.wrong[:8])])
        finished, cut = self.found["finished"], self.found["cut"]
        share = 0.8 if finished + cut > 300 else 0.65
        assert finished >= share * (finished + cut)
        assert not self.unfinished
        assert ALONE not in ends, self._finisher.alone


async def prove(kind: str, constraints: int, depths: Sequence[int], seed: int) -> None:
    proof = Proof(kind, seed)
    for depth in depths:
        await proof.run(constraints // len(depths), depth)
    assert proof.found["constraints"] == constraints
    proof.check()


SHORT = [("llguidance", kind, depth) for kind, depth in zip(MODELS, (2, 1, 2, 1), strict=True)]
SHORT += [("xgrammar", "byte_level", 1), ("xgrammar", "sentencepiece", 2)]


@pytest.mark.parametrize(("engine", "kind", "depth"), SHORT, indirect=["engine"])
async def test_answers_keep_their_constraints_and_change_no_neighbour(engine: str, kind: str, depth: int):
    await prove(kind, 12, [depth], seed=1)


@pytest.mark.exhaustive
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("part", [f"part{number}" for number in range(PARTS)])
async def test_many_answers_keep_their_constraints_and_change_no_neighbour(engine: str, kind: str, part: str):
    total = TOTALS[engine] if PARTS > 1 else 182
    await prove(kind, round(total * SHARES[kind] / PARTS), [1, 2], seed=2 + int(part.removeprefix("part")))
