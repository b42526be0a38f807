"""One choice of one request, as the scheduler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.request import Generate, Score

if TYPE_CHECKING:
    from infd.request import Adapter, FinishReason, Request, TokenLogprobs
    from infd.scheduler.layout import Regimes


Order = tuple[int, int]  # a place in the queue: the smaller goes first


class Sequence:
    """Tokens known, tokens planned, resources held, and why it ended.

    A sequence is owed the tokens in [computed, planned), except the token at
    its limit, which nothing follows. `computed` counts the tokens that are
    cached or will be once the steps in flight have run; `planned` counts the
    known tokens and those that these steps will sample.
    """

    __slots__ = (
        "adapter",
        "choice",
        "computed",
        "covered",
        "dropped_through",
        "end_ids",
        "failure",
        "finish",
        "first",
        "in_flight",
        "indexed",
        "keys",
        "last_step",
        "limit",
        "min_tokens",
        "order",
        "prefix_root",
        "prompt_cached",
        "prompt_logprobs",
        "prompt_tokens",
        "regime",
        "regime_limit",
        "request",
        "row",
        "scoring",
        "seed",
        "slot",
        "tables",
        "token_cost",
        "tokens",
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
        """first: the first choice of the same prompt, if this is a later one."""
        self.request = request
        self.adapter = adapter
        self.choice = choice
        self.first = first
        self.tokens = list(request.prompt)
        self.limit = self.prompt_tokens = len(self.tokens)
        self.prefix_root = prefix_root
        self.seed = self.min_tokens = 0
        self.end_ids: frozenset[int] = frozenset()
        self.scoring = False
        for want in request.wants:
            match want:
                case Generate(sampling, end_ids):
                    self.seed = sampling.seed + choice
                    self.min_tokens = sampling.min_tokens
                    self.end_ids = end_ids
                    self.limit += sampling.max_tokens  # known tokens at which it ends
                case Score():  # the first choice's are those of all
                    self.scoring = choice == 0 and self.prompt_tokens > 1  # log-probabilities still to come
        self.prompt_logprobs: list[TokenLogprobs] = []  # known, and not yet in an outcome
        self.token_cost = 1  # as how many tokens of the budget each of its own counts
        self.regime = 0  # of its rotary angles, see Regimes
        self.regime_limit = self.limit  # tokens that may be computed under its regime

        self.order: Order = (0, 0)  # kept through preemption
        self.computed = 0
        self.in_flight = 0  # samples not yet committed
        self.last_step = -1  # number of the last plan it was in since its admission
        self.dropped_through = -1  # results of plans up to this number are dropped: it was put on hold after them
        self.row: int | None = None
        self.slot = 0  # of its adapter, while it runs
        self.tables: list[list[int]] = []  # page ids per group; 0 where dropped behind a window
        self.covered = 0  # tokens that the tables have room for
        self.keys: dict[int, list[bytes]] = {}  # prefix keys of the full pages, by page_tokens
        self.indexed = 0  # leading tokens whose pages were offered to the prefix index
        self.prompt_cached: int | None = None  # prompt tokens found in the cache when it first ran
        self.finish: FinishReason | None = None
        self.failure: BaseException | None = None  # if finish is ERROR

    def set_regime(self, regimes: Regimes) -> None:
        """Choose the regime of a waiting sequence by the tokens known now."""
        regime = regimes.of(self.prompt_tokens, len(self.tokens))
        if regime != self.regime:
            self.regime = regime
            self.keys.clear()
        longest = regimes.longest(regime)
        self.regime_limit = self.limit if longest is None else longest

    @property
    def root(self) -> bytes:
        """The parent of its first prefix key."""
        return self.prefix_root + self.regime.to_bytes(4, "little") if self.regime else self.prefix_root

    @property
    def planned(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def complete(self) -> bool:
        """Whether nothing that its request wants is still to come."""
        return len(self.tokens) >= self.limit and not self.scoring

    @property
    def owes_scores(self) -> bool:
        """Whether log-probabilities of its prompt are still to be planned."""
        return self.scoring and self.finish is None and self.computed < self.prompt_tokens - 1

    @property
    def generated(self) -> int:
        """Tokens generated and known."""
        return len(self.tokens) - self.prompt_tokens

    def score(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Append log-probabilities of the prompt's tokens after token `start`, as far as they are not known yet.

        A sequence preempted in its prompt begins again while its last step is still in flight, so two steps may score
        the same tokens.
        """
        assert start <= len(self.prompt_logprobs), "part of the prompt was not scored"
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]
        if len(self.prompt_logprobs) == self.prompt_tokens - 1:
            self.scoring, self.token_cost = False, 1

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}/{self.choice} computed={self.computed} known={len(self.tokens)}"
            f" in_flight={self.in_flight} row={self.row} finish={self.finish}>"
        )
