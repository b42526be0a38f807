"""What one step computes, and its result: the messages between scheduler and executor.

Plain values only. A plan is a snapshot: a device thread, or another process,
reads it while the scheduler plans the next one. It names rows; which sequence
holds a row is known to the scheduler alone (`Scheduled`).
"""

from __future__ import annotations

from msgspec import Struct

from infd.errors import Fault
from infd.request import Adapter, TokenLogprobs, Want


class Join(Struct):
    """A sequence takes a row: everything the row must hold before its first span.

    tokens  all known tokens, prompt and generated
    wants   of its request
    tables  page ids per group, by page index; 0 where the page is behind the window
    seed    of its noise: the request's, and the choice's index added
    slot    of its adapter; 0: the model itself
    regime  of its rotary angles: see Regimes
    """

    row: int
    tokens: list[int]
    prompt_tokens: int
    wants: tuple[Want, ...]
    tables: list[list[int]]
    seed: int
    slot: int = 0
    regime: int = 0


class Grant(Struct, gc=False):
    """Page `page` becomes entry `index` of a row's table in one group."""

    row: int
    group: int
    index: int
    page: int


class Load(Struct, frozen=True):
    """An adapter replaces whatever is in a slot of the device."""

    slot: int
    adapter: Adapter


class Span(Struct, gc=False):
    """Compute `count` tokens of a row's sequence from `start`: their cache entries, and the readouts named here.

    samples  whether to sample the token after the last one
    scores   after how many tokens, counted from the first, to score the prompt token that follows
    """

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


class StepResult(Struct):
    """What a step's spans produced, in the plan's order.

    accepted         tokens each span yielded: 1 if it samples, else 0 (more under speculation)
    tokens           the yielded ids, span after span
    logprobs         by span index, one per yielded token, if requested
    prompt_logprobs  by span index, one per token that it scores
    failed           by span index: the fault of a sequence that failed alone (staging, non-finite logits, sampling)
    """

    accepted: list[int]
    tokens: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    failed: dict[int, Fault] = {}
