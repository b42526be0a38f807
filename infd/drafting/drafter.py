"""The interface of speculation: a drafter guesses the tokens that follow, for one choice of a request.

A step verifies drafts: it samples a token at every drafted position, and keeps samples as long as the drafts agree with
them. Drafts thus change no answer, only the number of tokens that a step yields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.request import Request


RUN: Final = 16  # tokens up to which lengths of runs are distinguished
LIKELY: Final = RUN + 1  # in a run's place: the draft is what a grammar allows, with the usual white space


class Drafter(Protocol):
    """Guesses the continuation of one choice. Used on the event loop, so `draft` takes microseconds."""

    @property
    def sure(self) -> bool:
        """Whether the last draft is almost certainly right, however often earlier drafts were wrong."""

    @property
    def run(self) -> int:
        """Length of the run of tokens that the last draft followed before, RUN at most; 0: not known; or LIKELY.

        The longer the run, the likelier is the draft.
        """

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return a guess of at most `most` tokens that follow `tokens`; none if there is no good guess.

        tokens  prompt and generated tokens of the choice; each call's tokens begin with the previous call's tokens
        """

    def finish(self, tokens: Sequence[int]) -> None:
        """Called once the choice has ended, with all its tokens."""


class Place(Protocol):
    """A place in an answer whose form is known, such as a JSON text by its schema.

    known   whether the form tells what may follow. Any thread may ask
    likely  whether the last guess begins as the answer was written before; otherwise with assumptions
    """

    known: bool
    likely: bool

    def read(self, tokens: Sequence[int]) -> None:
        """Read the answer's next tokens. Takes microseconds."""

    def guess(self, most: int) -> list[int]:
        """Return at most `most` tokens that probably follow; none within a value, or if the form does not tell."""

    def extended(self, drafts: list[int], most: int) -> list[int]:
        """Return drafts of a value; behind the first that ends the value, what probably follows it."""


class Drafting(Protocol):
    """Creates the drafter of each choice.

    most  most drafts that a step verifies for a choice
    """

    most: int

    def drafter(self, request: Request, root: bytes) -> Drafter:
        """Return a drafter for one choice of a request. Its drafts derive only from requests with an equal root.

        root  see engine/prefix_roots.py
        """


class NoDrafts:
    """Implements Drafter and Drafting: choices are decoded one token a step."""

    most = 0
    sure = False
    run = 0

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        return []

    def finish(self, tokens: Sequence[int]) -> None:
        """No-op: nothing is remembered."""

    def drafter(self, request: Request, root: bytes) -> Drafter:
        return self


NO_DRAFTS: Final = NoDrafts()
