"""Estimate what speculation gains without a model: replies of bench/speculation.jsonl pass the choice of drafts.

A step's duration is taken from a table, so the figures do not depend on the machine or its load. They compare ways to
choose drafts, and say nothing of a model's speed. What grammars force is left out.

    python bench/drafts.py FILE.gguf                                  one and eight streams, with each drafter
    python bench/drafts.py FILE.gguf --overhead 0.15 --noise 0.3      steps with drafts last longer than was measured at
                                                                      start, and durations scatter
    python bench/drafts.py FILE.gguf --late 0                         as on a GPU, where all steps are issued ahead

Plain decoding is timed with all steps issued ahead. Behind each gain is the share of steps issued ahead.

The last line is the bound of drafts for one stream that continue any earlier occurrence of the last known token, in the
prompt or the reply: of all such continuations those that let the reply end soonest, chosen in hindsight. First if every
step takes equally long, then by the table. No n-grams without other answers gain more.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from typing import TYPE_CHECKING

from speculation_requests import CORPUS

from infd.config import SchedulerConfig
from infd.drafting.ngram import NgramDrafting
from infd.drafting.suffix import SuffixDrafting
from infd.request import Generate, Request, SamplingParams
from infd.scheduler.cache import Cache
from infd.scheduler.layout import CacheLayout, Capacity, PageGroup
from infd.scheduler.plan import Span, StepPlan
from infd.scheduler.sequence import Sequence
from infd.scheduler.speculation import Speculation
from infd.scheduler.step_costs import StepCosts
from infd.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from infd.drafting.drafter import Drafting

MOST = SchedulerConfig().speculative_tokens
# Milliseconds of a step by rows, about those of a model of 135M parameters on two cores with AVX-512.
COSTS = (
    (1, 4.9), (2, 5.0), (3, 5.2), (4, 5.6), (5, 7.5), (6, 7.8), (8, 8.6), (10, 10.8), (12, 12.0), (16, 14.0),
    (24, 21.0), (32, 27.0), (48, 40.0), (64, 53.0),
)  # fmt: skip


class Replay:
    """A reply that is decoded again. `tokens` are its tokens, and the sequence has the known ones."""

    def __init__(self, prompt: list[int], tokens: list[int], drafting: Drafting, row: int) -> None:
        wants = (Generate(SamplingParams(max_tokens=len(tokens))),)
        request = Request(id="", prompt=tuple(prompt), wants=wants)
        self.seq = Sequence(request, drafter=drafting.drafter(request, b""))
        self.seq.row, self.seq.covered = row, len(prompt) + len(tokens) + MOST
        self.tokens = tokens
        self.seq.tokens.append(tokens[0])

    @property
    def complete(self) -> bool:
        return self.seq.generated >= len(self.tokens)

    def step(self, drafts: list[int]) -> int:
        """Append the drafts that the reply agrees with, and the token behind them; return the number of the former."""
        rest = self.tokens[self.seq.generated :]
        kept = 0
        while kept < min(len(drafts), len(rest)) and drafts[kept] == rest[kept]:
            kept += 1
        self.seq.tokens += rest[: kept + 1]
        return kept


class Replays:
    """Replies that are decoded with one choice of drafts, so many at once. The estimates of costs go on.

    steps  number of steps
    ahead  of these, steps that were issued while the step before was computed
    """

    def __init__(self, drafting: Drafting, streams: int, overhead: float, noise: float, late: float) -> None:
        layout = CacheLayout((PageGroup(layers=(0,), page_tokens=16),))
        capacity = Capacity(layout=layout, pages=64, rows=streams, step_tokens=1024, max_model_len=4096, vocab_size=1)
        costs = [(rows, ms / 1000) for rows, ms in COSTS]
        self._speculation = Speculation(Cache(capacity, prefix_caching=False), MOST, costs)
        self._costs = StepCosts(costs)
        self._late, self._ahead = late / 1000, False
        self.steps = self.ahead = 0
        self._drafting, self._streams, self._overhead, self._noise = drafting, streams, 1 + overhead, noise
        self._random = random.Random(1)  # noqa: S311 - durations are no secrets

    def gain(self, replies: list[tuple[list[int], list[int]]]) -> float:
        """Return how many times as fast the replies (prompt, reply) are decoded as without drafts."""
        with_drafts = without = 0.0
        self.steps = self.ahead = 0
        for at in range(0, len(replies), self._streams):
            self._ahead = False
            together = replies[at : at + self._streams]
            running = [Replay(*reply, self._drafting, row) for row, reply in enumerate(together)]
            for place in range(1, max(len(reply) for _, reply in together)):
                without += self._costs.of(sum(len(reply) > place for _, reply in together))
            while running := [replay for replay in running if not replay.complete]:
                with_drafts += self._step(running)
        return without / with_drafts

    def _step(self, running: list[Replay]) -> float:
        """Compute a step; return its duration."""
        decoding, ahead = [replay.seq for replay in running], self._ahead
        self._speculation.committed()
        self._speculation.choose([] if ahead else decoding, 1024)
        plan = StepPlan(0, [], [], [])
        for replay in running:
            seq = replay.seq
            drafts = self._speculation.draft(plan, seq, len(seq.tokens), MOST)
            plan.spans.append(Span(seq.row or 0, len(seq.tokens) - 1, 1 + drafts, 1 + drafts))
        self._ahead = self._late > 0 and not self._speculation.awaits(decoding)  # decided while the step is computed
        for replay, span in zip(running, plan.spans, strict=True):
            seq, drafts = replay.seq, span.drafts
            kept = replay.step(seq.drafts[:drafts])
            if drafts:
                self._speculation.count(seq, drafts, kept)
            if replay.complete:
                seq.drafter.finish(seq.tokens)
        self.steps, self.ahead = self.steps + 1, self.ahead + ahead
        seconds = self._costs.of(plan.tokens) * (self._overhead if plan.drafts else 1.0)
        seconds += 0.0 if ahead else self._late
        self._speculation.took(
            plan,
            seconds * self._random.lognormvariate(0.0, self._noise),
            masked=False,
            late=not ahead and self._late > 0,
        )
        return seconds


def repeated(prompt: list[int], reply: list[int]) -> list[int]:
    """Return for each place in the reply, from the second on, how many tokens from there on an n-gram may draft.

    A draft continues an occurrence of the token before, and the continuation repeats itself where it meets that token.
    """
    text = [*prompt, *reply]
    behind: dict[int, list[int]] = defaultdict(list)  # token -> places behind it
    for at, token in enumerate(prompt[:-1], 1):
        behind[token].append(at)
    found = []
    for at in range(len(prompt), len(text) - 1):
        behind[text[at - 1]].append(at)
        place, best = at + 1, 0
        for source in behind[text[at]]:
            count, period = 0, place - source
            while count < MOST and place + count < len(text) and text[source + count % period] == text[place + count]:
                count += 1
            best = max(best, count)
        found.append(best)
    return found


def bound(prompt: list[int], reply: list[int], costs: StepCosts) -> float:
    """Return the least duration of decoding a reply from its second token on, with drafts chosen in hindsight."""
    least = [0.0]  # of decoding the last 0, 1, 2, ... tokens
    for drafts in reversed(repeated(prompt, reply)):
        most = min(drafts, len(least) - 1)
        least.append(min(costs.of(1 + kept) + least[-1 - kept] for kept in range(most + 1)))
    return least[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="whose tokenizer is used")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of a reply")
    parser.add_argument("--overhead", type=float, default=0.0, help="share by which steps with drafts last longer")
    parser.add_argument("--noise", type=float, default=0.0, help="standard deviation of the durations' logarithm")
    parser.add_argument("--late", type=float, default=0.3, help="milliseconds that a step not issued ahead begins late")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(arguments.model)
    kinds: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for entry in map(json.loads, CORPUS.read_text(encoding="utf-8").splitlines()):
        prompt, reply = (tokenizer.encode(entry[key], add_special_tokens=False) for key in ("prompt", "reply"))
        kinds[entry["kind"]].append((prompt, reply[: arguments.tokens]))
    for streams in (1, 8):
        for name, drafting in (("ngram", NgramDrafting(MOST)), ("suffix", SuffixDrafting(MOST, 2**26))):
            replays = Replays(drafting, streams, arguments.overhead, arguments.noise, arguments.late)
            gains = []
            for kind, replies in kinds.items():
                gains.append(f"{kind} {replays.gain(replies):.2f} ({replays.ahead / replays.steps:.2f})")
            print(f"{streams} at once, {name}: {', '.join(gains)}")
    told = []
    for kind, replies in kinds.items():
        tokens = sum(len(reply) - 1 for _, reply in replies)
        equal, table = (
            tokens * costs.of(1) / sum(bound(*reply, costs) for reply in replies)
            for costs in (StepCosts(()), StepCosts([(rows, ms / 1000) for rows, ms in COSTS]))
        )
        told.append(f"{kind} {equal:.2f}, {table:.2f}")
    print(f"bound of n-grams: {'; '.join(told)}")


if __name__ == "__main__":
    main()
