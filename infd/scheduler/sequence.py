"""The scheduler's state of one choice of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.drafting.drafter import NO_DRAFTS
from infd.request import Generate, Pool, Route, Score
from infd.scheduler.pooling import PromptPooling
from infd.scheduler.routing import Routing

if TYPE_CHECKING:
    from infd.drafting.drafter import Drafter
    from infd.request import Adapter, FinishReason, Request, TokenLogprobs
    from infd.scheduler.layout import Regimes


QueuePlace = tuple[int, int]  # a place in the queue: smaller places are earlier


class Sequence:
    """Known and planned tokens, resources held, and the finish reason.

    Tokens [computed, planned) are to be computed, except the last token of a
    sequence at its limit, because no token follows it; a pooled prompt is computed
    to its end. `computed` counts the tokens that are cached, or will be once the
    steps in flight have run; `planned` counts the known tokens and the tokens that
    these steps sample. Both are upper bounds while drafts are in flight: a commit
    takes back the samples that were not kept.
    """

    __slots__ = (
        "adapter",
        "agreement",
        "charged",
        "choice",
        "computed",
        "covered",
        "drafted",
        "drafter",
        "drafts",
        "dropped_through",
        "end_ids",
        "failure",
        "finish",
        "first",
        "guess",
        "in_flight",
        "indexed",
        "kept_drafts",
        "keys",
        "last_step",
        "limit",
        "min_tokens",
        "misses",
        "mu",
        "place",
        "pooling",
        "preemptions",
        "prefix_root",
        "prompt_cached",
        "prompt_logprobs",
        "prompt_tokens",
        "regime",
        "regime_limit",
        "request",
        "routing",
        "row",
        "scoring",
        "seed",
        "skips",
        "slot",
        "tables",
        "token_cost",
        "tokens",
        "uncomputed",
        "whole",
    )

    def __init__(
        self,
        request: Request,
        choice: int = 0,
        *,
        prefix_root: bytes = b"",
        adapter: Adapter | None = None,
        first: Sequence | None = None,
        drafter: Drafter = NO_DRAFTS,
    ) -> None:
        """first: the first choice of the same prompt; None: this sequence is the first choice."""
        self.request = request
        self.adapter = adapter
        self.choice = choice
        self.first = first
        self.drafter = drafter
        # The drafter's last guess: the position of its first token, its tokens, and the length of the run before it.
        self.guess: tuple[int, list[int], int] = (0, [], 0)
        self.agreement: list[float] = []  # average agreement of guesses, see speculation.CLASSES; empty: not known yet
        self.misses = 0  # guesses in a row whose first token was wrong, or that were none
        self.skips = 0  # steps for which nothing is guessed
        self.drafts: list[int] = []  # the drafter's last guess, of tokens in flight and those behind; sure ones too
        self.drafted = self.kept_drafts = 0  # drafts verified, and of these kept
        self.tokens = list(request.prompt)
        self.limit = self.prompt_tokens = len(self.tokens)
        self.prefix_root = prefix_root
        self.seed = self.min_tokens = self.preemptions = 0
        self.end_ids: frozenset[int] = frozenset()
        self.scoring = False
        self.pooling: PromptPooling | None = None  # the numbers that the prompt is reduced to; None: it is not
        self.routing: Routing | None = None  # the experts of the computed tokens; None: they are not reported
        self.uncomputed = 1  # tokens at the limit that are not computed
        for want in request.wants:
            match want:
                case Generate(sampling, end_ids):
                    self.seed = sampling.seed + choice
                    self.min_tokens = sampling.min_tokens
                    self.end_ids = end_ids
                    # Each token changes mirostat's state, so one step cannot sample several positions.
                    if sampling.mirostat is not None:
                        self.drafter = NO_DRAFTS
                    self.limit += sampling.max_tokens  # the sequence ends at this many known tokens
                case Score():  # only the first choice scores the prompt that all choices share
                    self.scoring = choice == 0 and self.prompt_tokens > 1  # whether log-probabilities are still missing
                case Pool():
                    self.pooling, self.uncomputed = PromptPooling(want, self.prompt_tokens), 0
                    self.drafter = NO_DRAFTS
                case Route():  # with drafts the host would not know which positions a span computes
                    self.routing, self.drafter = Routing(self.prompt_tokens), NO_DRAFTS
        # Whether the output needs hidden states, logits or experts of all tokens known now: pages do not contain these.
        self.whole = self.scoring or self.pooling is not None or self.routing is not None
        self.prompt_logprobs: list[TokenLogprobs] = []  # known log-probabilities not yet in an outcome
        self.mu: float | None = None  # mirostat's state after the known tokens; None: no token is generated
        self.token_cost = 1  # tokens of the step's budget that a computed token costs
        self.regime = 0  # regime of the rotary angles; see layout.Regimes
        self.regime_limit = self.limit  # maximum tokens computed in this regime

        self.place: QueuePlace = (0, 0)  # unchanged by preemption
        self.charged = 0.0  # estimated work for which the tenant was charged, see fair_queue.py; 0: never ran
        self.computed = 0
        self.in_flight = 0  # number of planned samples, kept or not, that are not yet committed
        self.last_step = -1  # number of the last plan since admission that has a span of this sequence; -1: none
        self.dropped_through = -1  # results of plans up to this number are dropped, because of a later hold
        self.row: int | None = None
        self.slot = 0  # the adapter's slot while the sequence runs
        self.tables: list[list[int]] = []  # page ids per group; 0 if the page is behind the attention window
        self.covered = 0  # number of tokens for which the pages in `tables` suffice
        self.keys: dict[int, list[bytes]] = {}  # prefix keys of the full pages, by page_tokens
        self.indexed = 0  # leading tokens whose full pages are in the prefix index, or must not be added
        self.prompt_cached: int | None = None  # prompt tokens found in the cache when the sequence first ran
        self.finish: FinishReason | None = None
        self.failure: BaseException | None = None  # the error, if finish is ERROR

    def set_regime(self, regimes: Regimes) -> None:
        """Choose the regime of a waiting sequence by the tokens known now."""
        regime = regimes.of(self.prompt_tokens, len(self.tokens))
        if regime != self.regime:
            self.regime = regime
            self.keys.clear()
        longest = regimes.longest(regime)
        self.regime_limit = self.limit if longest is None else longest

    def continue_from(self, other: Sequence) -> None:
        """Take over the prefix keys of another sequence, with whose prompt this one's begins."""
        if self.root == other.root:  # no reset, reload or other regime between the two
            self.keys = {size: keys[: other.prompt_tokens // size] for size, keys in other.keys.items()}

    @property
    def root(self) -> bytes:
        """The parent of the first prefix key."""
        return self.prefix_root + self.regime.to_bytes(4, "little") if self.regime else self.prefix_root

    @property
    def planned(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def complete(self) -> bool:
        """Whether all tokens are generated, and all log-probabilities or numbers of the prompt are known."""
        pooled = self.pooling is None or self.pooling.result is not None
        return len(self.tokens) >= self.limit and not self.scoring and pooled

    @property
    def owes_scores(self) -> bool:
        """Whether the step whose token delivers the scores of the prompt has yet to be planned."""
        return self.scoring and self.finish is None and self.computed < self.prompt_tokens

    @property
    def generated(self) -> int:
        """Number of generated tokens whose ids are known."""
        return len(self.tokens) - self.prompt_tokens

    def score(self, start: int, logprobs: list[TokenLogprobs]) -> None:
        """Append the log-probabilities that are not known yet. `logprobs` are those of the prompt after token `start`.

        A sequence preempted in its prompt may be admitted again while its last step is in flight, so two steps may
        score the same tokens.
        """
        assert start <= len(self.prompt_logprobs), "part of the prompt was not scored"
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - start :]
        if len(self.prompt_logprobs) == self.prompt_tokens - 1:
            self.scoring, self.whole = False, self.routing is not None
            self.token_cost = 1

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.request.id}/{self.choice} computed={self.computed} known={len(self.tokens)}"
            f" in_flight={self.in_flight} row={self.row} finish={self.finish}>"
        )
