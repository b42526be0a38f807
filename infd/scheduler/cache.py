"""Decide which pages a sequence holds, and which of them others may find.

A page is offered to others by the step that fills it, and nobody finds it any
more if that step fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.scheduler.pages import PagePool
from infd.scheduler.prefix import PrefixIndex, longest_hit, page_keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.scheduler.layout import Capacity
    from infd.scheduler.sequence import Sequence


class Cache:
    """The pages in the tables of all sequences.

    pool         who holds which page
    index        which page holds which prefix
    page_tokens  of the smallest page: what a sequence computes before it has another one to offer
    """

    def __init__(self, capacity: Capacity, *, prefix_caching: bool) -> None:
        self.index = PrefixIndex()
        self.pool = PagePool(capacity.pages, self.index)
        self._layout = capacity.layout
        self._groups = capacity.layout.groups
        self._step_tokens = capacity.step_tokens
        self._prefix_caching = prefix_caching and bool(self._groups)
        self.page_tokens = min((group.page_tokens for group in self._groups), default=0)
        self._unsettled: dict[int, dict[Sequence, list[int]]] = {}  # pages indexed by each step in flight, and for whom

    # Pages of one sequence

    def looks_up(self, seq: Sequence) -> bool:
        """Whether cached pages are looked up for one that waits. A page holds no logits, so not where it is scored."""
        return self._prefix_caching and not seq.scoring

    def find(self, seq: Sequence) -> int:
        """Fill the tables of one that waits with cached pages, not yet held; return the tokens they cover."""
        if not self.looks_up(seq):
            return 0
        hit = longest_hit(seq, self._layout, self.index)
        for number, group in enumerate(self._groups):
            keys = page_keys(seq, group.page_tokens)
            table = [0] * (hit // group.page_tokens)
            for page in group.pages_needed(hit, hit):
                found = self.index.find(number, keys[page])
                assert found is not None
                table[page] = found
            seq.tables.append(table)
        return hit

    def wanted(self, seq: Sequence, running: int) -> int:
        """Bound the pages to be had before one that waits may run beside so many.

        Its own, found (unless somebody holds them) or not, and the next page of every answer. A running prompt
        needs no other word here: it takes all that is left of a step, so nobody is admitted before its end.
        """
        found = [page for table in seq.tables for page in table if page]
        fresh = sum(not self.pool.is_held(page) for page in found)
        peak = self._layout.peak_pages(len(seq.tokens), self._step_tokens)
        return max(0, peak - len(found)) + fresh + (running + 1) * len(self._groups)

    def hold(self, seq: Sequence, hit: int) -> None:
        """Let a sequence begin with the pages that were found for it."""
        if not seq.tables:
            seq.tables = [[] for _ in self._groups]
        for table in seq.tables:
            for page in table:
                if page:
                    self.pool.share(page)
        seq.computed = seq.indexed = hit
        seq.covered = hit if self._groups else seq.limit

    def shortage(self, seq: Sequence, end: int) -> int:
        """Give back the pages that it has left behind; return how many it lacks for tokens [computed, end)."""
        missing = 0
        for group, table in zip(self._groups, seq.tables, strict=True):
            page = min(group.pages_droppable(seq.computed), len(table)) - 1
            while page >= 0 and table[page]:  # before a page that was dropped, all were
                self.pool.release(table[page])
                table[page] = 0
                page -= 1
            missing += group.pages_needed(seq.computed, end).stop - len(table)
        return missing

    def extend(self, seq: Sequence, end: int) -> list[tuple[int, int, int]]:
        """Give it the pages that it lacks, which are there; return group, index and page of each."""
        granted: list[tuple[int, int, int]] = []
        for number, (group, table) in enumerate(zip(self._groups, seq.tables, strict=True)):
            for index in range(len(table), group.pages_needed(seq.computed, end).stop):
                page = self.pool.take()
                table.append(page)
                granted.append((number, index, page))
        seq.covered = min(len(table) * group.page_tokens for group, table in zip(self._groups, seq.tables, strict=True))
        return granted

    def release(self, seq: Sequence) -> None:
        """Take all pages from it; what it had computed is to be computed anew."""
        for table in seq.tables:
            for page in reversed(table):  # the end of a prefix is evicted before its beginning
                if page:
                    self.pool.release(page)
        seq.tables = []
        seq.computed = seq.covered = seq.indexed = 0

    # What others may find

    def offer(self, seq: Sequence, step: int) -> None:
        """Index the full pages whose tokens are known and computed; `step`, in flight, computes the last of them."""
        settled = min(seq.computed, len(seq.tokens))
        if settled - seq.indexed < self.page_tokens or not self._prefix_caching:
            return
        for number, (group, table) in enumerate(zip(self._groups, seq.tables, strict=True)):
            size = group.page_tokens
            first, stop = seq.indexed // size, settled // size
            if stop > first:
                keys = page_keys(seq, size)
                for index in range(first, stop):
                    page = table[index]
                    if page and self.index.put(number, keys[index], page):
                        self._unsettled.setdefault(step, {}).setdefault(seq, []).append(page)
        seq.indexed = max(seq.indexed, settled - settled % self._layout.alignment)

    def settle(self, step: int) -> None:
        """A step has ended well."""
        self._unsettled.pop(step, None)

    def spoil(self, step: int) -> None:
        """A step has failed: nobody may find what it was to write, whoever for."""
        for pages in self._unsettled.pop(step, {}).values():
            self._forget(pages)

    def withdraw(self, seq: Sequence) -> None:
        """Let nobody find what a sequence holds, or let go of while a step was still to write it."""
        for table in seq.tables:
            self._forget(table)
        for fresh in self._unsettled.values():
            self._forget(fresh.pop(seq, ()))

    def forget(self) -> int:
        """Let nobody find anything that is there now; return how many pages that were."""
        self._unsettled.clear()
        return self.pool.forget_all()

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page:
                self.pool.forget(page)

    def verify(self, everybody: Iterable[Sequence]) -> None:
        """Assert that every page is accounted for."""
        self.pool.verify(table for seq in everybody for table in seq.tables)
