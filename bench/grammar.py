"""Measure compilation of constraints by size, and filling of masks by number of rows.

    python bench/grammar.py --engine llguidance
    python bench/grammar.py --engine xgrammar --schemas 20

The vocabulary is made up, of the size of a real one; nine tenths are words. The real-world schemas of tests/grammar are
compiled once each, as the daemon does: written by a worker, compiled in this process. Masks are those of random answers
to as many different schemas as rows: at each step every row's answer grows by one random token that its mask allows,
ends excepted. Times of one thread are its processor time, those of two threads are on the clock.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from infd.constraint import JsonSchema
from infd.errors import GrammarFailed
from infd.grammar.protocol import Limits, Vocabulary
from infd.grammar.select import select
from infd.grammar.trial import Trial

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.grammar.protocol import Compiler, Grammar, Matcher

SCHEMAS = Path(__file__).parents[1] / "tests" / "grammar" / "schemas.json.xz"
CLASSES = (512, 2048, 8192, 2**20)  # bytes, upper ends


def main(arguments: argparse.Namespace) -> None:
    trial = Trial()
    began = time.perf_counter()
    trial(JsonSchema("{}"), Limits(), {}, {})
    print(f"a worker wrote its first constraint in {(time.perf_counter() - began) * 1e3:.0f} ms")
    vocabulary = words(arguments.tokens)
    began = time.perf_counter()
    selection = select(arguments.engine, vocabulary, trial)
    print(f"{selection.name}: compiler of {vocabulary.columns} tokens built in {time.perf_counter() - began:.2f} s")
    schemas = json.loads(lzma.decompress(SCHEMAS.read_bytes()))
    random.Random(1).shuffle(schemas)  # noqa: S311 - not secrets
    grammars = compile_all(selection.compiler, schemas[: arguments.schemas])
    for rows in arguments.rows:
        masks(selection.compiler, grammars, rows, arguments.steps)
    trial.close()


def words(count: int) -> Vocabulary:
    """Return a vocabulary of bytes, and of tokens of which nine tenths are letters, most behind a space."""
    draw = random.Random(1)  # noqa: S311 - not secrets
    letters, others = "etaoinshrdlucmfwypvbgkqjxz", 'etaoin0123456789 \n{}[]",:.-+\\/_()=<>;ABC'
    found: dict[bytes, None] = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(found) < count:
        word = "".join(draw.choices(letters, range(26, 0, -1), k=draw.randint(2, 9)))
        mixed = "".join(draw.choices(others, k=draw.randint(2, 5)))
        token = mixed if draw.random() < 0.1 else word if draw.random() < 0.4 else " " + word
        found[token.encode()] = None
    return Vocabulary([*found, b"<end>"], frozenset({count}), frozenset({count}), count + 1, lambda text: [])


def compile_all(compiler: Compiler, schemas: list[dict[str, Any]]) -> list[Grammar]:
    grammars: list[Grammar] = []
    least = 0
    for most in CLASSES:
        times, refused = [], 0
        for schema in schemas:
            if not least <= schema["bytes"] < most:
                continue
            began = time.perf_counter()
            try:
                grammars.append(compiler.compile(JsonSchema(json.dumps(schema["schema"])), Limits()))
            except GrammarFailed:
                refused += 1
            else:
                times.append((time.perf_counter() - began) * 1e3)
        print(f"schemas of {least} to {most} bytes, cold: {spread(times)}; {refused} refused")
        least = most
    return grammars


def masks(compiler: Compiler, grammars: list[Grammar], count: int, steps: int) -> None:
    """Print the times of `fill` for some rows, with one thread and with two, and of `advance`."""
    draw = random.Random(count)  # noqa: S311 - not secrets
    ends = list(compiler.vocabulary.end_ids)
    rows = np.empty((count, compiler.vocabulary.words), dtype=np.int32)
    matchers = [draw.choice(grammars).matcher() for _ in range(count)]
    filled: list[float] = []
    halved: list[float] = []
    advanced: list[float] = []
    with ThreadPoolExecutor(2) as pool:
        for step in range(steps):
            # On alternate steps, because a matcher computes the mask of a state once.
            times, fill = (filled, compiler.fill) if step % 2 else (halved, in_halves(compiler, pool))
            clock = time.thread_time if step % 2 else time.perf_counter
            began = clock()
            failures = fill(matchers, rows)
            times.append((clock() - began) * 1e3)
            tokens = [None if failure else drawn(row, ends, draw) for row, failure in zip(rows, failures, strict=True)]
            began = time.thread_time()
            for number, token in enumerate(tokens):
                if token is None or matchers[number].stopped:
                    matchers[number] = draw.choice(grammars).matcher()
                else:
                    matchers[number].advance([token])
            advanced.append((time.thread_time() - began) * 1e3)
    print(f"{count} rows: fill {spread(filled)}; by two threads {spread(halved)}; advance {spread(advanced)}")


def in_halves(compiler: Compiler, pool: ThreadPoolExecutor) -> Callable[[list[Matcher], Any], list[Any]]:
    def fill(matchers: list[Matcher], rows: Any) -> list[Any]:
        half = (len(matchers) + 1) // 2
        parts = [part for part in (slice(half), slice(half, None)) if matchers[part]]
        return [
            each for found in pool.map(lambda part: compiler.fill(matchers[part], rows[part]), parts) for each in found
        ]

    return fill


def drawn(row: Any, ends: list[int], draw: random.Random) -> int | None:
    """Return a random token that a row of a mask allows, no end; None: there is none."""
    allowed = np.unpackbits(row.view(np.uint8), bitorder="little")
    allowed[ends] = 0
    found = np.flatnonzero(allowed)
    return int(found[draw.randrange(found.size)]) if found.size else None


def spread(times: list[float]) -> str:
    if len(times) < 2:
        return f"{len(times)} measured"
    p95 = statistics.quantiles(times, n=20)[-1]
    return f"p50 {statistics.median(times):.3f}, p95 {p95:.3f}, max {max(times):.3f} ms of {len(times)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="llguidance")
    parser.add_argument("--schemas", type=int, default=500, help="most schemas compiled")
    parser.add_argument("--tokens", type=int, default=150_000, help="size of the vocabulary")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=400)
    main(parser.parse_args())
