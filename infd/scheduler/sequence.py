"""One choice of one request, as the scheduler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.request import Adapter, FinishReason, Request, TokenLogprobs
    from infd.scheduler.layout import Regimes
    from infd.scheduler.policy import Order


class Sequence:
    """Tokens known, tokens planned, pages held per group, and why it ended.

    A sequence is owed the tokens in [computed, planned), but for the one at its
    limit, which nothing follows. `computed` counts what is in the cache or will
    be once the steps in flight have run; `planned` counts the known tokens and
    the ones those steps will sample.
    """

    __slots__ = (
        "adapter",
        "choice",
        "computed",
        "covered",
        "dropped_through",
        "failure",
        "finish",
        "first",
        "in_flight",
        "indexed",
        "keys",
        "limit",
        "longest",
        "order",
        "prefix_root",
        "prompt_cached",
        "prompt_logprobs",
        "prompt_tokens",
        "regime",
        "request",
        "row",
        "scoring",
        "seed",
        "step",
        "tables",
        "tokens",
        "weight",
    )

    def __init__(
        self,
        request: Request,
        choice: int = 0,
        *,
        prefix_root: bytes = b"",
        adapter: Adapter | None = None,
        first: Sequence | None = None,
    ) -> None:
        """first: the first choice of the same prompt, where this is a later one."""
        self.request = request
        self.adapter = adapter
        self.choice = choice
        self.first = first
        self.seed = request.sampling.seed + choice
        self.tokens = list(request.prompt)
        self.prompt_tokens = len(self.tokens)
        self.limit = self.prompt_tokens + request.sampling.max_tokens  # tokens at which it ends
        self.prefix_root = prefix_root
        # Log-probabilities of its prompt are owed; those of the first choice are those of all.
        self.scoring = request.sampling.prompt_logprobs is not None and choice == 0 and self.prompt_tokens > 1
        self.prompt_logprobs: list[TokenLogprobs] = []  # known, and not yet handed on
        self.weight = 1  # as how many tokens of a step each of its own counts
        self.regime = 0  # of its rotary angles, see Regimes
        self.longest = self.limit  # tokens that may be computed under its regime

        self.order: Order = (0, 0)  # place in the queue; kept through preemption
        self.computed = 0
        self.in_flight = 0  # samples not yet committed
        self.step = -1  # number of the last plan it stood in
        self.dropped_through = -1  # number of the last plan whose result is dropped: it has been held since
        self.row: int | None = None
        self.tables: list[list[int]] = []  # page ids per group; 0 where dropped behind a window
        self.covered = 0  # tokens that the tables have room for
        self.keys: dict[int, list[bytes]] = {}  # prefix keys of the full pages, by page_tokens
        self.indexed = 0  # leading tokens whose pages were offered to the prefix index
        self.prompt_cached: int | None = None  # prompt tokens found in the cache when it first ran
        self.finish: FinishReason | None = None
        self.failure: BaseException | None = None  # why, where finish is ERROR

    def govern(self, regimes: Regimes) -> None:
        """Put a sequence that waits under the regime of the tokens known now."""
        regime = regimes.of(self.prompt_tokens, len(self.tokens))
        if regime != self.regime:
            self.regime = regime
            self.keys.clear()
        longest = regimes.longest(regime)
        self.longest = self.limit if longest is None else longest

    @property
    def root(self) -> bytes:
        """What its chain of prefix keys begins with."""
        return self.prefix_root + self.regime.to_bytes(4, "little") if self.regime else self.prefix_root

    @property
    def planned(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute for it at all."""
        return self.limit == self.prompt_tokens and not self.scoring

    @property
    def owes_scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to be planned."""
        return self.scoring and self.finish is None and self.computed < self.prompt_tokens - 1

    @property
    def generated(self) -> int:
        """Tokens generated and known."""
        return len(self.tokens) - self.prompt_tokens

    def score(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Add those of its prompt's log-probabilities, from the one after token `start` on, that are not known yet.

        One preempted in its prompt begins again while its last step is still in flight, so two steps may score the
        same tokens.
        """
        assert start <= len(self.prompt_logprobs), "a part of the prompt was not scored"
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]
        if len(self.prompt_logprobs) == self.prompt_tokens - 1:
            self.scoring, self.weight = False, 1

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}/{self.choice} computed={self.computed} known={len(self.tokens)}"
            f" in_flight={self.in_flight} row={self.row} finish={self.finish}>"
        )
