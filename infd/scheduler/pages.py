"""Reference counts of pages.

A page is free, cached (unreferenced, but in the prefix index) or referenced.
Free pages are granted first, then cached pages in the order of their release.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.scheduler.prefix import PrefixIndex


class PagePool:
    """Page ids 1..pages and their reference counts."""

    def __init__(self, pages: int, index: PrefixIndex) -> None:
        self.total = pages
        self._index = index
        self._free = list(range(pages, 0, -1))  # the last entry is granted next
        self._cached: dict[int, None] = {}  # in order of release
        self._references = [0] * (pages + 1)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def referenced(self) -> int:
        return self.total - self.available

    def is_held(self, page: int) -> bool:
        return self._references[page] > 0

    def take(self) -> int:
        """Grant a page, evicting a cached page if no page is free. `available` must not be 0."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._cached))
            del self._cached[page]
            self._index.forget(page)
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page found in the prefix index."""
        if not self._references[page]:
            del self._cached[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        """Drop a reference. A page without references is cached if it is indexed, else free."""
        self._references[page] -= 1
        assert self._references[page] >= 0, f"page {page} released more often than held"
        if not self._references[page]:
            if page in self._index:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget(self, page: int) -> None:
        """Remove a page from the prefix index, whether it is referenced or not."""
        self._index.forget(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def forget_all(self) -> int:
        """Empty the prefix index; return how many pages were indexed."""
        count = len(self._index)
        self._index.clear()
        self._free += reversed(self._cached)
        self._cached.clear()
        return count

    def verify(self, tables: Iterable[Iterable[int]]) -> None:
        """Assert that every page is free, cached or in a table. `tables` are those of all sequences and groups."""
        held = Counter(page for table in tables for page in table if page)
        for page in range(1, self.total + 1):
            assert self._references[page] == held[page], f"page {page}: {self._references[page]} != {held[page]} held"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        assert not (free | cached) & held.keys(), "a held page was released"
        assert len(free) + len(cached) + len(held) == self.total, "a page is lost"
        assert all(page in self._index for page in cached), "a cached page is not indexed"
        assert not any(page in self._index for page in free), "a free page is indexed"
