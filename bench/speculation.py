"""Measure what speculation gains on bench/speculation.jsonl: decoding with each drafter beside decoding without drafts.

Each setting has its own model in this process. All models have the step sizes and durations that the first one measured
at start, so they cut prompts alike, and their answers are compared token for token. All answer a request before any
begins the next one, each time in another order. A ratio is the median of the ratios of answers to the same requests.
Only decoding is timed, from the first token to the last. Models draft nothing that another setting's model has seen.

    python bench/speculation.py smollm2                       the model's own greedy answers
    python bench/speculation.py DIR --replay --take 8         a test sampler repeats the corpus's replies; DIR is a
                                                              checkpoint of bench/random_checkpoint.py
    python bench/speculation.py smollm2 --streams 8           eight requests at once
    python bench/speculation.py smollm2 --way off             the noise: a second model without drafts beside the first
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
import shlex
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from msgspec.structs import replace
from native_kernels import require_native_kernels
from server_process import ServerProcess, free_port

import infd.runner.runner
import infd.runner.start.assembly
from infd import LLM
from infd.runner.row_sampling import Integer
from infd.runner.sampler import Sampler
from infd.runner.start.calibration import Calibration, calibrate

if TYPE_CHECKING:
    from infd.runner.sampled import Likeliest, SampledPositions

CORPUS = Path(__file__).with_name("speculation.jsonl")
WAYS = ("off", "ngram", "suffix")
WARMING = 4  # answers of a peer that are not measured: vLLM's first ones are slow


class Replaying(Sampler):
    """Samples as ever, then replaces each greedy token by the token of a reply.

    replies  by the seed of the request; not 0, which is the seed of the steps that are measured at start
    """

    replies: ClassVar[dict[int, list[int]]] = {}
    _at: SampledPositions | None = None

    def __call__(
        self, logits: Any, at: SampledPositions, allowed: Any, appended: Any = None, samples: Any = None
    ) -> Any:
        self._at = at
        return super().__call__(logits, at, allowed, None, samples)

    def likeliest(self, logits: torch.Tensor) -> Likeliest:
        found, at = super().likeliest(logits), self._at
        if at is None or not self.replies:
            return found
        self._at = None
        rows = self._rows.integers[at.rows]
        places = zip(rows[:, Integer.SEED_LOW].tolist(), (at.ends - rows[:, Integer.PROMPT]).tolist(), strict=True)
        tokens = found.tokens.tolist()
        for row, (seed, place) in enumerate(places):
            if (reply := self.replies.get(seed)) is not None:
                tokens[row] = reply[min(place, len(reply) - 1)]
        return found._replace(tokens=torch.tensor(tokens))


def measure_once() -> None:
    """Let every model that is loaded from now on have what the first of them measures."""
    found: list[Calibration] = []

    def measured(trial: Any, settings: Any, most: int) -> Calibration:
        if not found:
            found.append(calibrate(trial, replace(settings, speculative="ngram"), most))
        return found[0]

    infd.runner.start.assembly.calibrate = measured


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


class Way:
    """A model with one setting of --speculative."""

    def __init__(self, name: str, model: str, speculative: str, streams: int, settings: dict[str, Any]) -> None:
        self.name = name
        self._llm = LLM(model, speculative=speculative, max_num_seqs=streams, **settings)

    def close(self) -> None:
        self._llm.close()

    def encode(self, text: str) -> list[int]:
        return self._backend.model().tokenizer.encode(text, add_special_tokens=False)

    def answer(self, requests: list[dict[str, Any]]) -> Answered:
        """Answer requests at once."""
        if len(requests) > 1:  # prompts are computed before the clock starts, one by one, so all models cut them alike
            for each in requests:
                self._answers([{**each, "max_tokens": 1}])
        before, began = self._drafts(), time.perf_counter()
        answers = self._answers(requests)
        took = time.perf_counter() - began
        spans, drafted, kept = (b - a for a, b in zip(before, self._drafts(), strict=True))
        tokens = sum(each.usage.completion_tokens for each in answers)
        if len(requests) == 1:
            tokens, took = tokens - 1, answers[0].timings.predicted_ms / 1000
        found = [each.choices[0].token_ids for each in answers]
        return Answered(Count(tokens, took, spans, drafted, kept), found)

    @property
    def _backend(self) -> Any:
        return self._llm._server._backend

    def _drafts(self) -> tuple[int, int, int]:
        counted = self._backend.engine.core.scheduler.speculation
        return counted.drafts, counted.drafted, sum(counted.accepted)

    def _answers(self, requests: list[dict[str, Any]]) -> list[Any]:
        from infd.http.apis.chat import CHAT
        from infd.http.apis.completions import COMPLETIONS
        from infd.http.schema.chat import ChatResponse
        from infd.http.schema.completions import CompletionResponse

        kinds = {True: (CHAT, ChatResponse), False: (COMPLETIONS, CompletionResponse)}
        api, kind = kinds["messages" in requests[0]]
        return self._llm._answer(api, requests, kind, progress=False)


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

    def __init__(self, kind: str, peers: list[str]) -> None:
        self._kind = kind
        self._peers = peers
        self._counts: dict[str, Count] = defaultdict(Count)
        self._ratios: dict[str, list[float]] = defaultdict(list)
        self._equal: dict[str, list[bool]] = defaultdict(list)

    def add(self, found: dict[str, Answered]) -> None:
        plain = found["off"]
        if not all(each.count.tokens for each in found.values()):
            return
        for way, (count, answers) in found.items():
            self._counts[way] = self._counts[way].plus(count)
            self._ratios[way].append(count.rate / plain.count.rate)
            self._equal[way] += [a == b for a, b in zip(answers, plain.tokens, strict=False)]

    def show(self) -> None:
        for way, count in self._counts.items():
            line = f"{self._kind:12} {way:7} {count.tokens:6} tokens {count.rate:7.1f} tok/s"
            if way != "off":
                equal = self._equal[way]
                line += f"  ratio {_spread(self._ratios[way])}"
                line += f", {sum(equal)} of {len(equal)} answers equal" if equal else ""
                line += f", {_drafts(count)}"
            print(line, flush=True)
        for peer in self._peers:
            told = [
                f"{way} {_spread([a / b for a, b in zip(ratios, self._ratios[peer], strict=True)])}"
                for way, ratios in self._ratios.items()
                if way not in self._peers
            ]
            print(f"{self._kind:12} over {peer}: {', '.join(told)}", flush=True)


def _spread(ratios: list[float]) -> str:
    """Return the median; tenth and ninetieth percentile; the number."""
    ratios = sorted(ratios)
    tenth = len(ratios) // 10
    return f"{median(ratios):.3f} ({ratios[tenth]:.2f} to {ratios[-1 - tenth]:.2f}; {len(ratios)})"


def _drafts(count: Count) -> str:
    kept = f"{count.kept / count.drafted if count.drafted else 0:4.0%} kept"
    if not count.spans:
        return f"{count.drafted} drafts, {kept}"
    return (
        f"{count.drafted / count.spans:.1f} drafts a span that has any, {kept}, {1 + count.kept / count.spans:.2f}"
        f" tokens; {count.spans} such spans"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--way", action="append", choices=WAYS, help="repeatable; default: ngram and suffix")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="repeatable")
    parser.add_argument("--kind", action="append", help="repeatable; default: all")
    parser.add_argument("--take", type=int, default=40, help="requests of a kind")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no request of a kind later")
    parser.add_argument("--replay", action="store_true")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.peer and arguments.streams > 1:
        parser.error("peers answer one request at a time")
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
    taken = [each for kind in kinds.values() for each in kind[:: max(1, len(kind) // arguments.take)][: arguments.take]]
    if arguments.replay:
        infd.runner.runner.Sampler = Replaying  # type: ignore[misc]
        source = Way("source", "smollm2", "off", 1, settings | {"kv_cache_bytes": "64MiB"})
        bodies = replayed(source.encode, taken, arguments.tokens)
        source.close()
    else:
        bodies = [asked(each, arguments.tokens) for each in taken]
    settings |= {"kv_cache_bytes": "768MiB", "quantization": arguments.quantization}
    measure_once()
    chosen = {"off": "off"} | {"again" if way == "off" else way: way for way in arguments.way or WAYS[1:]}
    ways: list[Way | Peer] = [
        Way(name, arguments.model, way, arguments.streams, settings) for name, way in chosen.items()
    ]
    ways += peers
    turn = 0
    for kind in kinds:
        of_kind = [body for entry, body in zip(taken, bodies, strict=True) if entry["kind"] == kind]
        began, compared = time.monotonic(), Compared(kind, [peer.name for peer in peers])
        for at in range(0, len(of_kind), arguments.streams):
            if time.monotonic() - began > arguments.seconds:
                break
            first, turn = turn % len(ways), turn + 1
            answered = {
                way.name: way.answer(of_kind[at : at + arguments.streams]) for way in ways[first:] + ways[:first]
            }
            compared.add({way.name: answered[way.name] for way in ways})
        compared.show()
    for way in ways:
        way.close()


if __name__ == "__main__":
    main()
