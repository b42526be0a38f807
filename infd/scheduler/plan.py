"""What one step computes, and what came of it: the words between scheduler and runner.

A plan is a snapshot. The device thread reads it while the scheduler goes on, so
it holds no object that the scheduler changes later, except `Span.seq`, which
only the scheduler looks into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from infd.request import Adapter, SamplingParams, TokenLogprobs
    from infd.scheduler.sequence import Sequence


class Join(Struct):
    """A sequence takes a row: everything the row must hold before its first span.

    tokens  all known tokens, prompt and generated
    tables  page ids per group, by page index; 0 where the page is behind the window
    slot    of its adapter; 0: the model itself
    """

    row: int
    tokens: list[int]
    prompt_tokens: int
    sampling: SamplingParams
    end_ids: frozenset[int]
    tables: list[list[int]]
    seed: int
    slot: int = 0


class Grant(Struct, gc=False):
    """Page `page` becomes entry `index` of a row's table in one group."""

    row: int
    group: int
    index: int
    page: int


class Load(Struct, frozen=True):
    """An adapter takes a slot of the device, whatever was there before."""

    slot: int
    adapter: Adapter


class Span(Struct, gc=False):
    """Compute `count` tokens of `seq` from `start`: for their cache, and for what is said besides.

    samples  whether the token after the last one is to be sampled
    scores   of how many tokens, from the first on, the log-probability of the prompt token that follows is wanted
    """

    seq: Sequence
    row: int
    start: int
    count: int
    samples: bool
    scores: int = 0


class StepPlan(Struct):
    """One step. Loads first, then joins, then grants, then all spans in one forward pass."""

    number: int
    joins: list[Join]
    grants: list[Grant]
    spans: list[Span]
    loads: list[Load] = []

    @property
    def tokens(self) -> int:
        return sum(span.count for span in self.spans)

    @property
    def admitted(self) -> list[Sequence]:
        """The sequences that join with this step: their spans are its last ones, in the order of the joins."""
        return [span.seq for span in self.spans[len(self.spans) - len(self.joins) :]]


class StepResult(Struct):
    """What a step's spans produced, in the plan's order.

    accepted         tokens each span yielded: 1 where it samples, else 0 (more under speculation)
    tokens           the yielded ids, span after span
    logprobs         by span index, one per yielded token, where asked
    prompt_logprobs  by span index, one per token that it scores
    failed           by span index: the error of a sequence that failed alone (staging, non-finite logits, sampling)
    """

    accepted: list[int]
    tokens: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    failed: dict[int, Exception] = {}
