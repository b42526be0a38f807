"""Wait for a GPU's steps on a thread of its own, so that the device thread can launch further plans meanwhile.

Steps end in the order of their launch, so one thread waits for them in turn. It starts with the first step that is
waited for: on a CPU there is none, and no thread.
"""

from __future__ import annotations

from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Waiter(Generic[T]):
    """Waits for steps and reports their ends. Leaving its context waits for all steps taken."""

    def __init__(
        self, wait: Callable[[T], None], tell: Callable[[T, Exception | None], None], begin: Callable[[], None]
    ) -> None:
        """All are called on the waiter's thread: `begin` first; `tell` with what `wait` raised, or None."""
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
        """Wait for this step after the steps taken before."""
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
            except Exception as raised:  # `tell` passes it on
                error = raised
            self._tell(*given, error)
