"""One choice of one request, as the scheduler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.request import FinishReason, Request


class Sequence:
    """Tokens known, tokens planned, pages held per group, and why it ended.

    A sequence is owed the tokens in [computed, planned). `computed` counts what
    is in the cache or will be once the steps in flight have run; `planned`
    counts the known tokens and the ones those steps will sample.
    """

    __slots__ = (
        "choice",
        "computed",
        "constrained",
        "failure",
        "finish",
        "in_flight",
        "indexed",
        "keys",
        "leader",
        "order",
        "prefix_root",
        "prompt_cached",
        "prompt_tokens",
        "request",
        "row",
        "seed",
        "tables",
        "tokens",
    )

    def __init__(
        self, request: Request, choice: int = 0, *, prefix_root: bytes = b"", leader: Sequence | None = None
    ) -> None:
        self.request = request
        self.choice = choice
        self.seed = request.sampling.seed + choice
        self.tokens = list(request.prompt)
        self.prompt_tokens = len(self.tokens)
        self.prefix_root = prefix_root
        self.leader = leader  # wait until its prompt is planned, then share its pages
        self.constrained = False  # sampling needs a mask that depends on the last token

        self.order: int = 0  # place in the queue; smaller first; kept through preemption
        self.computed = 0
        self.in_flight = 0  # samples not yet committed
        self.row: int | None = None
        self.tables: list[list[int]] = []  # page ids per group; 0 where dropped behind a window
        self.keys: dict[int, list[bytes]] = {}  # prefix keys of the full pages, by page_tokens
        self.indexed: list[int] = []  # per group, leading pages already offered to the prefix index
        self.prompt_cached: int | None = None  # prompt tokens found in the cache when it first ran
        self.finish: FinishReason | None = None
        self.failure: Exception | None = None

    @property
    def planned(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def generated(self) -> int:
        """Tokens generated and known."""
        return len(self.tokens) - self.prompt_tokens

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}/{self.choice} computed={self.computed} known={len(self.tokens)}"
            f" in_flight={self.in_flight} row={self.row} finish={self.finish}>"
        )
