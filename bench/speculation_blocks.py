"""A comparison of steps: drafts are switched on and off every few tokens, while answers are written."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from speculation_figures import Count, drafts, spread

if TYPE_CHECKING:
    from speculation_ways import Loaded, Way


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
                f" answers equal; {drafts(drafted)}",
                flush=True,
            )
