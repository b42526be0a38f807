"""Wait for the device on a thread of its own, so that the device thread can issue what arrives meanwhile.

Steps end in the order in which they were issued, so one thread waits for one after the other. It is started with the
first of them: where the device's work is the host's, there is none.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Waiter(Generic[T]):
    """Waits, and tells. Leaving its context waits for all that it was given."""

    def __init__(
        self, wait: Callable[[T], None], tell: Callable[[T, Exception | None], None], begin: Callable[[], None]
    ) -> None:
        """All are called on the waiter's thread: `begin` first, `tell` with what `wait` raised, if it did."""
        self._wait = wait
        self._tell = tell
        self._begin = begin
        self._given: SimpleQueue[tuple[T] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def take(self, what: T) -> None:
        """Wait for this, behind what was given before."""
        if self._thread is None:
            self._thread = Thread(target=self._run, name="infd-waiter", daemon=True)
            self._thread.start()
        self._given.put((what,))

    def _run(self) -> None:
        self._begin()
        while (given := self._given.get()) is not None:
            error = None
            try:
                self._wait(*given)
            except Exception as raised:  # it belongs to whoever is told
                error = raised
            self._tell(*given, error)
