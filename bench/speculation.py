"""Measure what speculation gains on bench/speculation.jsonl: decoding with each drafter beside decoding without drafts.

Each setting has its own model in this process, and answers each request in turn, so a ratio is of two answers within
seconds.
Only decoding is timed, from the first token to the last. Models draft nothing that another setting's model has seen.

    python bench/speculation.py smollm2                       the model's own greedy answers
    python bench/speculation.py DIR --replay --take 8         a test sampler repeats the corpus's replies; DIR is a
                                                              checkpoint of bench/random_checkpoint.py
    python bench/speculation.py smollm2 --streams 8           eight requests at once
    python bench/speculation.py smollm2 --peer 'NAME=COMMAND' a server of the same file answers the same requests, with
                                                              its own drafts; $port in COMMAND is its port

The corpus's texts are tokens of SmolLM2 (`make test-data`), whichever model is measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import tempfile
import time
from collections import defaultdict
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from server_process import free_port

import infd.runner.runner
from infd import LLM
from infd.runner.rows import Integer
from infd.runner.sampler import Likeliest, SampledPositions, Sampler

CORPUS = Path(__file__).with_name("speculation.jsonl")
WAYS = ("off", "ngram", "suffix")


class Replaying(Sampler):
    """Samples as ever, then replaces each greedy token by the token of a reply. A row's seed is the reply's number."""

    replies: ClassVar[list[list[int]]] = []
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
        tokens = [reply[min(place, len(reply) - 1)] for reply, place in ((self.replies[seed], p) for seed, p in places)]
        return found._replace(tokens=torch.tensor(tokens))


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


class Way:
    """A model with one setting of --speculative."""

    def __init__(self, model: str, speculative: str, streams: int, settings: dict[str, Any]) -> None:
        self.name = speculative
        self._llm = LLM(model, speculative=speculative, max_num_seqs=streams, **settings)

    def close(self) -> None:
        self._llm.close()

    def encode(self, text: str) -> list[int]:
        return self._backend.model().tokenizer.encode(text, add_special_tokens=False)

    def answer(self, requests: list[dict[str, Any]]) -> Count:
        """Answer requests at once."""
        if len(requests) > 1:  # prompts are computed before the clock starts
            self._answers([{**each, "max_tokens": 1} for each in requests])
        before, began = self._drafts(), time.perf_counter()
        answers = self._answers(requests)
        took = time.perf_counter() - began
        spans, drafted, kept = (b - a for a, b in zip(before, self._drafts(), strict=True))
        tokens = sum(each.usage.completion_tokens for each in answers)
        if len(requests) == 1:
            tokens, took = tokens - 1, answers[0].timings.predicted_ms / 1000
        return Count(tokens, took, spans, drafted, kept)

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
    """A server with llama.cpp's `timings` in its answers. Its drafts are set by its command."""

    def __init__(self, described: str) -> None:
        self.name, command = described.split("=", 1)
        self._port = free_port()
        words = [word.replace("$port", str(self._port)) for word in shlex.split(command)]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while self._call("GET", "/health")[0] != 200:
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.name} did not start")
            time.sleep(0.1)

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the answer's status and JSON; status 0 if the server cannot be reached."""
        connection = HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.load(answer)
        except OSError:
            return 0, None
        finally:
            connection.close()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def answer(self, requests: list[dict[str, Any]]) -> Count:
        (body,) = requests
        told = self._call("POST", "/v1/chat/completions", {**body, "cache_prompt": False})[1]["timings"]
        drafted, kept = told.get("draft_n", 0), told.get("draft_n_accepted", 0)
        # Spans with drafts are not reported.
        return Count(told["predicted_n"] - 1, told["predicted_ms"] / 1000, 0, drafted, kept)


def asked(entry: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return a chat request that the model answers itself."""
    body = {"messages": [{"role": "user", "content": entry["prompt"]}], "max_tokens": tokens, "temperature": 0}
    if "schema" in entry:
        named = {"name": "orders", "schema": entry["schema"], "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


def replayed(encode: Any, entries: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return requests whose answers are the corpus's replies."""
    bodies = []
    for number, entry in enumerate(entries):
        prompt = encode(f"<|im_start|>user\n{entry['prompt']}<|im_end|>\n<|im_start|>assistant\n")
        reply = encode(entry["reply"])[:tokens]
        Replaying.replies.append(reply)
        bodies.append(
            {"prompt": prompt, "max_tokens": len(reply), "temperature": 0, "seed": number, "ignore_eos": True}
        )
    return bodies


def show(kind: str, counts: dict[str, Count], ratios: dict[str, list[float]]) -> None:
    plain = counts["off"]
    print(f"{kind:12} {'off':7} {plain.tokens:6} tokens {plain.rate:7.1f} tok/s", flush=True)
    for way, count in counts.items():
        if way == "off":
            continue
        apart = sorted(ratios[way])
        kept = count.kept / count.drafted if count.drafted else 0.0
        spread = f"{apart[len(apart) // 10]:.2f} to {apart[-1 - len(apart) // 10]:.2f}"
        spans = (
            f"{count.drafted / count.spans:.1f} drafts a span that has any, {kept:4.0%} kept,"
            f" {1 + count.kept / count.spans:.2f} tokens; {count.spans} such spans"
            if count.spans
            else f"{count.drafted} drafts, {kept:4.0%} kept"
        )
        print(
            f"{kind:12} {way:7} {count.tokens:6} tokens {count.rate:7.1f} tok/s  ratio {count.rate / plain.rate:.2f}"
            f" ({spread}), {spans}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--way", action="append", choices=WAYS[1:], help="repeatable; default: all")
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
        source = Way("smollm2", "off", 1, settings | {"kv_cache_bytes": "64MiB"})
        bodies = replayed(source.encode, taken, arguments.tokens)
        source.close()
    else:
        bodies = [asked(each, arguments.tokens) for each in taken]
    settings |= {"kv_cache_bytes": "768MiB", "quantization": arguments.quantization}
    chosen = ["off", *(arguments.way or WAYS[1:])]
    ways: list[Way | Peer] = [Way(arguments.model, way, arguments.streams, settings) for way in chosen]
    ways += map(Peer, arguments.peer)
    chosen = [way.name for way in ways]
    totals: dict[str, dict[str, Count]] = defaultdict(lambda: dict.fromkeys(chosen, Count()))
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    turn = 0
    for kind in kinds:
        of_kind = [body for entry, body in zip(taken, bodies, strict=True) if entry["kind"] == kind]
        began = time.monotonic()
        for at in range(0, len(of_kind), arguments.streams):
            if time.monotonic() - began > arguments.seconds:
                break
            together = of_kind[at : at + arguments.streams]
            turn += 1
            found = {way.name: way.answer(together) for way in ways[:: 1 if turn % 2 else -1]}
            if not all(count.tokens for count in found.values()):
                continue
            for way, count in found.items():
                totals[kind][way] = totals[kind][way].plus(count)
                ratios[kind][way].append(count.rate / found["off"].rate)
        show(kind, totals[kind], ratios[kind])
    for way in ways:
        way.close()


if __name__ == "__main__":
    main()
