"""Decide which pages a sequence holds, and which pages other sequences may share.

A page is added to the prefix index once its tokens are known and the step that
fills it is planned. The page is removed from the index if that step fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.scheduler.pages import PagePool
from infd.scheduler.prefix import PrefixIndex, longest_hit, page_keys
from infd.scheduler.resources import Resource

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from collections.abc import Sequence as Many

    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence

Tables = list[list[int]]  # page ids by group and page index; 0 if the page is behind the attention window


class Cache(Resource):
    """The KV cache: the pages of all running sequences, and the unreferenced pages of the prefix index.

    pool         reference counts of pages
    index        the pages of cached prefixes
    page_tokens  tokens of the smallest page of any group; 0 without groups
    """

    def __init__(self, capacity: Capacity, *, prefix_caching: bool) -> None:
        self.index = PrefixIndex()
        self.pool = PagePool(capacity.pages, self.index)
        self._layout = capacity.layout
        self._groups = capacity.layout.groups
        self._step_tokens = capacity.step_tokens
        self._prefix_caching = prefix_caching and bool(self._groups)
        self.page_tokens = min((group.page_tokens for group in self._groups), default=0)
        self._running = 0  # number of sequences that hold pages
        self._found: tuple[int, Tables] = (0, [])  # tokens and pages of the prefix hit that `fits` accepted last
        self._refused: tuple[Sequence, int] | None = None  # the last sequence that did not fit, and the available pages
        self._unsettled: dict[int, dict[Sequence, list[int]]] = {}  # pages indexed for steps in flight, by step number

    # Admission

    def uses_prefix_cache(self, seq: Sequence) -> bool:
        """Return whether a waiting sequence may use cached pages.

        A sequence whose output reads hidden states or experts of all its tokens may not: pages do not contain them.
        """
        return self._prefix_caching and not seq.whole

    def fits(self, seq: Sequence, reserved: Many[Sequence]) -> bool:
        """Return whether pages suffice for a sequence's known tokens in addition to the needs of other sequences.

        Every running sequence needs the next page of each group; every reserved sequence, pages for its known tokens.
        If no sequence runs or is reserved, every sequence fits. No pages are reserved for the rest of a prompt that is
        computed in chunks: until its last chunk the prompt takes all remaining tokens of each step, so no sequence is
        admitted.
        """
        if not self._groups:
            self._found = 0, []
            return True
        available = self.pool.available
        if (seq, available) == self._refused:
            return False
        hit, tables = self._find(seq)
        found = [page for table in tables for page in table if page]
        evictable = sum(not self.pool.is_held(page) for page in found)  # these pages count as available until shared
        needed = self._pages_to_run(seq, len(found)) + evictable + self._running * len(self._groups)
        needed += sum(self._pages_to_run(other) for other in reserved)
        if needed > available and (self._running or reserved):
            if not reserved:
                self._refused = seq, available
            return False
        self._found = hit, tables
        return True

    def take(self, seq: Sequence, plan: StepPlan) -> None:
        """Start a sequence with the cached pages of its prefix."""
        hit, seq.tables = self._found
        for table in seq.tables:
            for page in table:
                if page:
                    self.pool.share(page)
        seq.computed = seq.indexed = hit
        seq.covered = hit if self._groups else seq.limit
        self._running += 1

    def release(self, seq: Sequence) -> None:
        """Release all pages of a sequence, whose tokens must later be found in the prefix index or computed again."""
        for table in seq.tables:
            for page in reversed(table):  # so that the end of a prefix is evicted before its beginning
                if page:
                    self.pool.release(page)
        seq.tables = []
        seq.computed = seq.covered = seq.indexed = 0
        self._running -= 1
        self._refused = None

    def _find(self, seq: Sequence) -> tuple[int, Tables]:
        """Return the number of a sequence's cached tokens, and the pages that contain them."""
        if not self.uses_prefix_cache(seq):
            return 0, [[] for _ in self._groups]
        hit, tables = longest_hit(seq, self._layout, self.index), []
        for number, group in enumerate(self._groups):
            keys = page_keys(seq, group.page_tokens)
            table = [0] * (hit // group.page_tokens)
            for index in group.pages_needed(hit, hit):
                page = self.index.find(number, keys[index])
                assert page is not None
                table[index] = page
            tables.append(table)
        return hit, tables

    def _pages_to_run(self, seq: Sequence, found: int = 0) -> int:
        """Return the maximum number of pages that a waiting sequence needs in addition to `found` cached pages.

        These are the sequence's peak for its known tokens, and the next page of each group.
        """
        peak = self._layout.peak_pages(len(seq.tokens), self._step_tokens)
        return max(0, peak - found) + len(self._groups)

    @property
    def spare(self) -> int:
        """Number of available pages beyond the next page of each running sequence and group."""
        return self.pool.available - self._running * len(self._groups)

    # Page allocation

    def shortage(self, seq: Sequence, end: int) -> int:
        """Release a sequence's pages behind the attention window.

        Returns the number of pages that the sequence lacks for tokens [computed, end).
        """
        missing = 0
        first = min(seq.computed, len(seq.tokens) - 1)  # if drafts in flight are rejected, a span may start here
        for group, table in zip(self._groups, seq.tables, strict=True):
            page = min(group.pages_droppable(first), len(table)) - 1
            while page >= 0 and table[page]:  # all pages before a dropped page were dropped too
                self.pool.release(table[page])
                table[page] = 0
                page -= 1
            missing += group.pages_needed(seq.computed, end).stop - len(table)
        return missing

    def extend(self, seq: Sequence, end: int) -> list[tuple[int, int, int]]:
        """Append the pages that a sequence lacks for tokens [computed, end); return their groups, indices and ids.

        The caller must have checked that as many pages as `shortage` returns are available.
        """
        granted: list[tuple[int, int, int]] = []
        for number, (group, table) in enumerate(zip(self._groups, seq.tables, strict=True)):
            for index in range(len(table), group.pages_needed(seq.computed, end).stop):
                page = self.pool.take()
                table.append(page)
                granted.append((number, index, page))
        seq.covered = min(len(table) * group.page_tokens for group, table in zip(self._groups, seq.tables, strict=True))
        return granted

    # Prefix index

    def index_pages(self, seq: Sequence, step: int) -> None:
        """Add full pages of a sequence to the prefix index: those whose tokens are known, and computed or in flight.

        step  number of the step in flight that computes the last of these tokens
        """
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

    def settle(self, plan: StepPlan) -> None:
        self._unsettled.pop(plan.number, None)

    def undo(self, plan: StepPlan) -> None:
        """Remove from the prefix index the pages that a failed step was to fill."""
        for pages in self._unsettled.pop(plan.number, {}).values():
            self._forget(pages)

    def unindex(self, seq: Sequence) -> None:
        """Remove from the prefix index the pages that a sequence holds.

        Pages that the sequence has released are removed too, if a step in flight still fills them.
        """
        for table in seq.tables:
            self._forget(table)
        for fresh in self._unsettled.values():
            self._forget(fresh.pop(seq, ()))

    def forget(self) -> int:
        """Empty the prefix index; return the number of pages that were indexed."""
        self._unsettled.clear()
        return self.pool.forget_all()

    def _forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page:
                self.pool.forget(page)

    def verify(self, running: Collection[Sequence]) -> None:
        assert self._running == len(running), "sequences that hold pages are miscounted"
        self.pool.verify(table for seq in running for table in seq.tables)
