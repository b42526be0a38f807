"""Bound the numbers that large answers of pooling hold together, from before they are computed until they are sent."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from infd.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.config import LiveConfig

# Larger answers are counted. Smaller ones are always accepted, so that large ones never cause refusals of these.
SMALL_BYTES: Final = 2**16


class HeldNumbers:
    """Counts the bytes of the numbers of large answers against `scheduler.max_pooled_bytes`.

    size  bytes of the answers in progress
    """

    def __init__(self, live: LiveConfig) -> None:
        self.size = 0
        self._live = live

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Count an answer's numbers until the block ends. Raises Overloaded; an answer fits in any case if it is alone.

        size  bytes of the answer's numbers
        """
        if size <= SMALL_BYTES:
            yield
            return
        most = self._live.now.scheduler.max_pooled_bytes
        if self.size and self.size + size > most:
            raise Overloaded(
                f"answers in progress hold up to {self.size} bytes of numbers, of at most {most}"
                f" (scheduler.max_pooled_bytes): {size} more would be too many; fewer or shorter inputs need fewer"
            )
        self.size += size
        try:
            yield
        finally:
            self.size -= size
