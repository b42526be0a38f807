"""A comparison of whole answers: all ways and peers answer the same requests in turn."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from speculation_figures import Count, drafts, spread
from speculation_peers import Peer

if TYPE_CHECKING:
    from speculation_ways import Way


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
                line += f"; {drafts(count)}"
            print(line, flush=True)
        for peer in self._peers:
            told = [
                f"{way} {spread([a / b for a, b in zip(ratios, self._ratios[peer], strict=True)])}"
                for way, ratios in self._ratios.items()
                if way not in self._peers
            ]
            print(f"{self._kind:12} over {peer}: {', '.join(told)}", flush=True)
