"""Measure what speculation gains on bench/speculation.jsonl: decoding with each drafter beside decoding without drafts.

One model is loaded. Its drafter is exchanged while no request is in flight, so all ways read the same weights, and the
pages of the same prompts. All ways answer the same requests before any way answers the next ones, each time in another
order. Answers are compared token for token. A ratio is one of answers to the same requests; with --block, of steps a
few tenths of a second apart. Shown are the median of the ratios, and the bounds of nine tenths of the medians of as
many ratios drawn from them. Only decoding is timed: of one stream from the first token to the last, of several with
prompts that are cached. In the second of several passes, drafters remember no answer of the first.

    python bench/speculation.py smollm2                       the model's own greedy answers
    python bench/speculation.py DIR --replay --take 10        a test sampler repeats the corpus's replies; DIR is a
                                                              checkpoint of bench/random_checkpoint.py
    python bench/speculation.py smollm2 --streams 8           eight requests at once
    python bench/speculation.py smollm2 --streams 8 --block 64
                                                              drafts are switched on and off every 64 tokens, while
                                                              answers are written: tells one per cent
    python bench/speculation.py smollm2 --way off             the noise: plain decoding beside plain decoding
    python bench/speculation.py smollm2 --way declined        requests that turn drafts off
    python bench/speculation.py smollm2 --peer 'NAME=COMMAND' a server of the same file answers the same requests, with
                                                              its own drafts, and is stopped (SIGSTOP) meanwhile; $port
                                                              in COMMAND is its port. llama.cpp's servers report when
                                                              tokens were computed; of others the times count at which
                                                              tokens arrive

The corpus's texts are tokens of SmolLM2 (`make test-data`), whichever model is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack, closing
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from native_kernels import require_native_kernels
from server_process import ServerProcess, free_port

import infd.runner.runner
from infd import LLM
from infd.config import SchedulerConfig
from infd.drafting.select import drafting
from infd.http.apis.chat import CHAT
from infd.http.apis.completions import COMPLETIONS
from infd.http.schema.chat import ChatResponse
from infd.http.schema.completions import CompletionResponse
from infd.runner.row_sampling import Integer
from infd.runner.sampler import Sampler
from infd.scheduler.speculation import Speculation

if TYPE_CHECKING:
    import torch

    from infd.runner.sampled import Likeliest, SampledPositions
    from infd.text.tokenizer import Tokenizer

CORPUS = Path(__file__).with_name("speculation.jsonl")
WAYS = ("off", "ngram", "suffix", "declined")
DEFAULT_WAYS = ("ngram", "suffix")
DRAWS = 2000
WARMING = 4  # answers of a peer that are not measured: vLLM's first ones are slow


class Replaying(Sampler):
    """Samples as ever, but the likeliest token of a row is the token of a reply.

    replies  by the seed of the request; not 0, which is the seed of the steps that are measured at start
    """

    replies: ClassVar[dict[int, list[int]]] = {}
    _at: SampledPositions | None = None

    def __call__(
        self,
        logits: Any,
        at: SampledPositions,
        allowed: Any,
        likeliest: Likeliest | None = None,
        samples: Any = None,
    ) -> Any:
        if likeliest is None:
            self._at = at
        elif self._replace(likeliest, at) and samples is None:  # the step has appended its own tokens
            self._rows.on_host.append(at.row_ids, at.ends.numpy(), likeliest.tokens.numpy())
        return super().__call__(logits, at, allowed, likeliest, samples)

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        found, at = super().likeliest(logits), self._at
        self._at = None
        if at is not None:
            self._replace(found, at)
        return found

    def _replace(self, found: Likeliest, at: SampledPositions) -> bool:
        """Replace tokens in place; return whether any row has a reply."""
        if not self.replies:
            return False
        rows = self._rows.integers.numpy()[at.row_ids]
        places = zip(
            rows[:, Integer.SEED_LOW].tolist(), (at.ends.numpy() - rows[:, Integer.PROMPT]).tolist(), strict=True
        )
        tokens, any_reply = found.tokens.numpy(), False
        for i, (seed, place) in enumerate(places):
            if (reply := self.replies.get(seed)) is not None:
                tokens[i], any_reply = reply[min(place, len(reply) - 1)], True
        return any_reply


class Count(NamedTuple):
    """Tokens decoded behind first tokens, seconds, spans with drafts, drafts verified and kept."""

    tokens: int = 0
    seconds: float = 0.0
    spans: int = 0
    drafted: int = 0
    kept: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Answered(NamedTuple):
    """Answers to requests at once. tokens: of each answer; a peer's are not known."""

    count: Count
    tokens: list[list[int]]


class Loaded:
    """A loaded model, whose drafter is exchanged."""

    def __init__(self, model: str, streams: int, settings: dict[str, Any]) -> None:
        # Loaded with drafts, so that the costs of their steps are measured.
        self._llm = LLM(model, speculative="ngram", max_num_seqs=streams, **settings)
        self._used: Way | None = None

    def close(self) -> None:
        self._llm.close()

    @property
    def _backend(self) -> Any:
        return self._llm._server._backend

    @property
    def core(self) -> Any:
        return self._backend.engine.core

    @property
    def row_costs(self) -> tuple[tuple[int, float], ...]:
        return self.core.capacity.row_costs

    def encode(self, text: str) -> list[int]:
        return self._backend.model().tokenizer.encode(text, add_special_tokens=False)

    def speculation(self, most: int) -> Speculation:
        return Speculation(self.core.scheduler.cache, most, self.row_costs)

    def use(self, way: Way) -> None:
        """Let requests be answered by another way, once the last step in flight has ended."""
        core = self.core
        while core.loop.in_flight or len(core.in_flight):
            time.sleep(1e-4)
        core.in_flight._drafting = way.drafting
        self.speculate(way)

    def speculate(self, way: Way) -> None:
        """Let a way choose the drafts of the steps that follow."""
        core = self.core
        if core.scheduler.speculation is not way.speculation:
            way.speculation.committed()  # other tokens are known than those that it considered last
            core.scheduler.speculation = way.speculation
        core.loop._constraints._most_drafts = way.drafting.most
        core.loop._constraints._seeks = way.speculation.pays_alone

    def answers(self, requests: list[dict[str, Any]]) -> list[Any]:
        kinds = {True: (CHAT, ChatResponse), False: (COMPLETIONS, CompletionResponse)}
        api, kind = kinds["messages" in requests[0]]
        return self._llm._answer(api, requests, kind, progress=False)


class Way:
    """One setting of --speculative for a loaded model; or `declined`: suffixes, which each request turns off."""

    def __init__(self, name: str, loaded: Loaded, speculative: str) -> None:
        self.name = name
        self._declines = speculative == "declined"
        self._settings = SchedulerConfig(speculative="suffix" if self._declines else speculative)
        self._loaded = loaded
        self.forget()
        self.speculation = loaded.speculation(self.drafting.most)

    def forget(self) -> None:
        """Forget earlier answers, but not what was learned of costs and agreement."""
        self.drafting = drafting(self._settings)

    def answer(self, requests: list[dict[str, Any]]) -> Answered:
        """Answer requests at once."""
        loaded = self._loaded
        loaded.use(self)
        if self._declines:
            requests = [{**each, "speculative": False} for each in requests]
        before, began = self._drafts(), time.perf_counter()
        answers = loaded.answers(requests)
        took = time.perf_counter() - began
        spans, drafted, kept = (b - a for a, b in zip(before, self._drafts(), strict=True))
        tokens = sum(each.usage.completion_tokens for each in answers)
        if len(requests) == 1:
            tokens, took = tokens - 1, answers[0].timings.predicted_ms / 1000
        found = [each.choices[0].token_ids for each in answers]
        return Answered(Count(tokens, took, spans, drafted, kept), found)

    def _drafts(self) -> tuple[int, int, int]:
        counted = self.speculation
        return counted.drafts, counted.drafted, sum(counted.accepted)


class Blocks:
    """Steps of a way and steps of plain decoding, in blocks of tokens that follow one another as in a b b a."""

    def __init__(self, tokens: int) -> None:
        """Set up. tokens: of a block. Blocks of as many steps would count texts that repeat themselves more."""
        self.totals = Count(), Count()  # of the way and of plain decoding
        self.ratios: list[float] = []  # of four blocks
        self._tokens = tokens
        self._done = 0
        self._four = Count(), Count()

    @property
    def plain(self) -> bool:
        """Whether the next step is one of plain decoding."""
        return self._done // self._tokens % 4 in (1, 2)

    def add(self, step: Count) -> None:
        way, off = self._four
        self._four = way, off = (way, off.plus(step)) if self.plain else (way.plus(step), off)
        self._done += step.tokens
        if self._done >= 4 * self._tokens:
            self._done -= 4 * self._tokens
            self.totals = self.totals[0].plus(way), self.totals[1].plus(off)
            if way.tokens and off.tokens:  # not if one step was longer than a block
                self.ratios.append(way.rate / off.rate)
            self._four = Count(), Count()


class Alternated:
    """Each way's answers to the requests of one kind, with drafts switched on and off.

    Compares steps that are tenths of a second apart, so what else the machine does cancels out. Drafters read in their
    own blocks what was decoded in the others, and seek forced tokens there anew: the ratio is rather too low.
    """

    def __init__(self, kind: str, loaded: Loaded, off: Way, tokens: int) -> None:
        """Set up. tokens: of a block."""
        self._kind, self._loaded, self._off = kind, loaded, off
        self.blocks: dict[str, Blocks] = defaultdict(lambda: Blocks(tokens))
        self.equal: dict[str, list[bool]] = defaultdict(list)
        self._plain: dict[str, list[list[int]]] = {}
        self._last = 0.0

    def add(self, requests: list[dict[str, Any]], ways: list[Way]) -> None:
        """Let each way answer the requests."""
        key = json.dumps(requests)
        if key not in self._plain:
            self._plain[key] = self._off.answer(requests).tokens
        scheduler = self._loaded.core.scheduler
        for way in ways:
            self._last = time.perf_counter()
            scheduler.commit = partial(self._commit, scheduler.commit, way, self.blocks[way.name])
            found = way.answer(requests).tokens
            del scheduler.commit
            self.equal[way.name] += [a == b for a, b in zip(found, self._plain[key], strict=True)]

    def _commit(self, commit: Any, way: Way, blocks: Blocks, step: Any, result: Any) -> Any:
        """Commit a step, and choose whether the next ones have drafts."""
        found, now, spans = commit(step, result), time.perf_counter(), step.plan.spans
        if all(span.count == span.samples for span in spans):
            drafts = [(span.drafts, kept - 1) for span, kept in zip(spans, result.accepted, strict=True) if span.drafts]
            verified = len(drafts), sum(each[0] for each in drafts), sum(each[1] for each in drafts)
            blocks.add(Count(sum(result.accepted), now - self._last, *verified))
        if way.speculation is not self._loaded.core.scheduler.speculation or blocks.plain:
            # A way learns no durations of others' steps.
            self._loaded.core.loop._last = self._loaded.core.loop._clock()
        self._loaded.speculate(self._off if blocks.plain else way)
        self._last = now
        return found

    def show(self) -> None:
        for way, blocks in self.blocks.items():
            (drafted, plain), equal = blocks.totals, self.equal[way]
            print(
                f"{self._kind:12} {way:8} {drafted.rate:7.1f} tok/s, plain {plain.rate:7.1f}  ratio"
                f" {spread(blocks.ratios)}, all together {drafted.rate / plain.rate:.3f}; {sum(equal)} of {len(equal)}"
                f" answers equal; {_drafts(drafted)}",
                flush=True,
            )


class Peer:
    """A running server of OpenAI's API, which answers one request at a time. Its drafts are set by its command."""

    def __init__(self, server: ServerProcess) -> None:
        self.name = server.name
        self._server = server
        with closing(self._connection()) as connection:
            connection.request("GET", "/v1/models")
            self._model = json.loads(connection.getresponse().read())["data"][0]["id"]
        for _ in range(WARMING):
            self.answer([asked({"prompt": "Count from one to a hundred."}, 64)])

    def close(self) -> None:
        self._server.thaw()

    def _connection(self) -> HTTPConnection:
        # A server closes idle connections while it is stopped, so each request has its own.
        return HTTPConnection(self._server.url.removeprefix("http://"))

    def answer(self, requests: list[dict[str, Any]]) -> Answered:
        """Answer a request. The tokens are empty if the server does not report them."""
        (body,) = requests
        streamed = {"stream": True, "stream_options": {"include_usage": True}, "cache_prompt": False}
        sent = json.dumps({**body, **streamed, "model": self._model})
        self._server.thaw()
        arrived, tokens, told = [], [], {}
        with closing(self._connection()) as connection:
            connection.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise SystemExit(f"{self.name}: {response.status} {response.read().decode()}")
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                told |= {name: event[name] for name in ("usage", "timings") if event.get(name)}
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    # The end's token has no text.
                    if choice["delta"].get("content") or choice.get("finish_reason"):
                        arrived.append(time.perf_counter())
        self._server.freeze()
        generated, took, drafts = told["usage"]["completion_tokens"], arrived[-1] - arrived[0], (0, 0)
        if (timings := told.get("timings")) is not None:
            generated, took = timings["predicted_n"], timings["predicted_ms"] / 1000
            drafts = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        # Spans with drafts are not reported.
        return Answered(Count(generated - 1 if took else 0, took, 0, *drafts), [tokens] if tokens else [])


def described_server(described: str, logs: Path) -> ServerProcess:
    """Return the server of NAME=COMMAND, not started."""
    name, command = described.split("=", 1)
    port = free_port()
    words = [word.replace("$port", str(port)) for word in shlex.split(command)]
    return ServerProcess(name, words, port, ready="/health", start_s=300, log=logs / f"{name}.log")


def asked(entry: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return a chat request that the model answers itself."""
    body = {"messages": [{"role": "user", "content": entry["prompt"]}], "max_tokens": tokens, "temperature": 0}
    body["return_token_ids"] = True
    if "schema" in entry:
        named = {"name": "orders", "schema": entry["schema"], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


def replayed(encode: Any, entries: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return requests whose answers are the corpus's replies."""
    bodies = []
    for seed, entry in enumerate(entries, 1):
        prompt = encode(f"<|im_start|>user\n{entry['prompt']}<|im_end|>\n<|im_start|>assistant\n")
        reply = encode(entry["reply"])[:tokens]
        Replaying.replies[seed] = reply
        bodies.append(
            {
                "prompt": prompt,
                "max_tokens": len(reply),
                "temperature": 0,
                "seed": seed,
                "ignore_eos": True,
                "return_token_ids": True,
            }
        )
    return bodies


class Compared:
    """The answers of all ways and peers to the requests of one kind."""

    def __init__(self, kind: str, off: Way) -> None:
        self._kind = kind
        self._off = off
        self._counts: dict[str, Count] = defaultdict(Count)
        self._ratios: dict[str, list[float]] = defaultdict(list)
        self._equal: dict[str, list[bool]] = defaultdict(list)
        self._peers: set[str] = set()
        self._turn = 0

    def add(self, requests: list[dict[str, Any]], ways: list[Way | Peer]) -> None:
        """Let plain decoding and all ways answer the same requests in turn, each time in another order."""
        self._peers |= {way.name for way in ways if isinstance(way, Peer)}
        every: list[Way | Peer] = [self._off, *ways]
        first, self._turn = self._turn % len(every), self._turn + 1
        found = {way.name: way.answer(requests) for way in every[first:] + every[:first]}
        if not all(each.count.tokens for each in found.values()):
            return
        plain = found["off"]
        for way in every:
            count, answers = found[way.name]
            self._counts[way.name] = self._counts[way.name].plus(count)
            self._ratios[way.name].append(count.rate / plain.count.rate)
            self._equal[way.name] += [a == b for a, b in zip(answers, plain.tokens, strict=False)]

    def show(self) -> None:
        plain = self._counts["off"]
        for way, count in self._counts.items():
            line = f"{self._kind:12} {way:8} {count.tokens:6} tokens {count.rate:7.1f} tok/s"
            if way != "off":
                equal = self._equal[way]
                line += f"  ratio {spread(self._ratios[way])}, all together {count.rate / plain.rate:.3f}"
                line += f"; {sum(equal)} of {len(equal)} answers equal" if equal else ""
                line += f"; {_drafts(count)}"
            print(line, flush=True)
        for peer in self._peers:
            told = [
                f"{way} {spread([a / b for a, b in zip(ratios, self._ratios[peer], strict=True)])}"
                for way, ratios in self._ratios.items()
                if way not in self._peers
            ]
            print(f"{self._kind:12} over {peer}: {', '.join(told)}", flush=True)


def spread(ratios: list[float]) -> str:
    """Return the median, the interval that nine tenths of medians of redrawn ratios are in, and the number."""
    draw = random.Random(1)  # noqa: S311 - intervals are no secrets
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    twentieth = DRAWS // 20
    return f"{median(ratios):.3f} ({medians[twentieth]:.3f} to {medians[-1 - twentieth]:.3f}; {len(ratios)})"


def _drafts(count: Count) -> str:
    kept = f"{count.kept / count.drafted if count.drafted else 0:4.0%} kept"
    if not count.spans:
        return f"{count.drafted} drafts, {kept}"
    return (
        f"{count.drafted / count.spans:.1f} drafts a span that has any, {kept}, {1 + count.kept / count.spans:.2f}"
        f" tokens; {count.spans} such spans"
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument(
        "--way", action="append", choices=WAYS, help=f"repeatable; default: {' and '.join(DEFAULT_WAYS)}"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="repeatable")
    parser.add_argument("--kind", action="append", help="repeatable; default: all")
    parser.add_argument("--take", type=int, default=40, help="requests of a kind")
    parser.add_argument("--skip", type=int, default=0, help="of these, requests that an earlier run has measured")
    parser.add_argument("--passes", type=int, default=1, help="how often the requests are answered")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--block", type=int, default=0, help="switch drafts on and off every so many tokens")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no request of a kind later")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=2)
    return parser


def main() -> None:
    arguments = parser().parse_args()
    if arguments.peer and arguments.streams > 1:
        parser().error("peers answer one request at a time")
    if arguments.peer and arguments.block:
        parser().error("a peer's drafts are not switched")
    require_native_kernels()
    asyncio.run(started(arguments))


async def started(arguments: argparse.Namespace) -> None:
    """Measure beside running servers."""
    logs = Path(tempfile.mkdtemp())
    async with AsyncExitStack() as stack:
        servers = [described_server(each, logs) for each in arguments.peer]
        await asyncio.gather(*map(stack.enter_async_context, servers))
        peers = [Peer(server) for server in servers]
        if peers:
            print(f"{', '.join(peer.name for peer in peers)} started, logs are in {logs}", flush=True)
        measure(arguments, peers)


def measure(arguments: argparse.Namespace, peers: list[Peer]) -> None:
    settings = {"device": "cpu", "device__threads": arguments.threads, "max_model_len": 1024}
    settings["device__kernel_cache"] = tempfile.mkdtemp()  # steps are measured now, not read from a busier hour
    entries = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        if arguments.kind is None or entry["kind"] in arguments.kind:
            kinds[entry["kind"]].append(entry)
    # Spread over the kind, whose neighbouring requests may share a text.
    taken = [
        each
        for kind in kinds.values()
        for each in kind[:: max(1, len(kind) // arguments.take)][: arguments.take][arguments.skip :]
    ]
    if arguments.replay:
        infd.runner.runner.Sampler = Replaying  # type: ignore[misc]
        bodies = replayed(tokenizer().encode, taken, arguments.tokens)
    else:
        bodies = [asked(each, arguments.tokens) for each in taken]
    settings |= {"kv_cache_bytes": "768MiB", "quantization": arguments.quantization}
    loaded = Loaded(arguments.model, arguments.streams, settings)
    print("ms of a step by rows:", ", ".join(f"{rows} {1000 * seconds:.2f}" for rows, seconds in loaded.row_costs))
    off = Way("off", loaded, "off")
    ours = [Way("again" if way == "off" else way, loaded, way) for way in arguments.way or DEFAULT_WAYS]
    ways = [*ours, *peers]
    for way in (off, *ways):  # caches and pages are first touched
        way.answer(bodies[: arguments.streams])
    for kind in kinds:
        of_kind = [body for entry, body in zip(taken, bodies, strict=True) if entry["kind"] == kind]
        rounds = [of_kind[at : at + arguments.streams] for at in range(0, len(of_kind), arguments.streams)]
        found = Alternated(kind, loaded, off, arguments.block) if arguments.block else Compared(kind, off)
        began = time.monotonic()
        for turn in range(arguments.passes * len(rounds)):
            if time.monotonic() - began > arguments.seconds:
                break
            if turn % len(rounds) == 0:
                for way in ours:
                    way.forget()
            requests = rounds[turn % len(rounds)]
            # All ways find prompts in the cache: a prompt that is computed whole may differ in rounding.
            for each in requests:
                off.answer([{**each, "max_tokens": 1}])
            found.add(requests, ways)
        found.show()
    for peer in peers:
        peer.close()
    loaded.close()


def tokenizer() -> Tokenizer:
    """Return SmolLM2's tokenizer."""
    with LLM("smollm2", device="cpu", max_model_len=256, kv_cache_bytes="16MiB") as model:
        found: Tokenizer = model._server._backend.model().tokenizer
    return found


if __name__ == "__main__":
    main()
