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
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

from native_kernels import require_native_kernels
from speculation_answers import Compared
from speculation_blocks import Alternated
from speculation_peers import Peer, described_server
from speculation_replay import replay, replayed, tokenizer
from speculation_requests import asked, taken
from speculation_ways import WAYS, Loaded, Way

DEFAULT_WAYS = ("ngram", "suffix")


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
    kinds = taken(arguments.kind, arguments.take, arguments.skip)
    entries = [entry for of_kind in kinds.values() for entry in of_kind]
    if arguments.replay:
        replay()
        bodies = replayed(tokenizer().encode, entries, arguments.tokens)
    else:
        bodies = [asked(entry, arguments.tokens) for entry in entries]
    settings |= {"kv_cache_bytes": "768MiB", "quantization": arguments.quantization}
    loaded = Loaded(arguments.model, arguments.streams, settings)
    print("ms of a step by rows:", ", ".join(f"{rows} {1000 * seconds:.2f}" for rows, seconds in loaded.row_costs))
    off = Way("off", loaded, "off")
    ours = [Way("again" if way == "off" else way, loaded, way) for way in arguments.way or DEFAULT_WAYS]
    ways = [*ours, *peers]
    for way in (off, *ways):  # caches and pages are first touched
        way.answer(bodies[: arguments.streams])
    for kind in kinds:
        of_kind = [body for entry, body in zip(entries, bodies, strict=True) if entry["kind"] == kind]
        rounds = [of_kind[at : at + arguments.streams] for at in range(0, len(of_kind), arguments.streams)]
        comparison = Alternated(kind, loaded, off, arguments.block) if arguments.block else Compared(kind, off)
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
            comparison.add(requests, ways)
        comparison.show()
    for peer in peers:
        peer.close()
    loaded.close()


if __name__ == "__main__":
    main()
