"""Messages between scheduler and executor: a step's plan and its result.

Plain values only. A plan is a snapshot: a device thread, or another process,
reads it while the scheduler plans the next step. A plan names rows; only the scheduler
maps rows to sequences (`Scheduled`).
"""

from __future__ import annotations

from msgspec import Struct

from infd.errors import Fault
from infd.request import Adapter, Pooled, RoutedExperts, TokenLogprobs, Want


class Join(Struct):
    """A sequence joins the persistent batch: the state of its row before the first span.

    tokens  all known tokens, prompt and generated
    wants   the request's wants: Generate, Score or both, and Route beside these; or Pool
    tables  page ids per group, by page index; 0 if the page is behind the attention window
    seed    seed of the sampling noise: the request's seed plus the choice's index
    slot    the adapter's slot; 0: no adapter
    regime  regime of the rotary angles; see layout.Regimes
    mu      mirostat's state after the last token; None: no token is generated
    """

    row: int
    tokens: list[int]
    prompt_tokens: int
    wants: tuple[Want, ...]
    tables: list[list[int]]
    seed: int
    slot: int = 0
    regime: int = 0
    mu: float | None = None


class Grant(Struct, gc=False):
    """Page `page` becomes entry `index` of a row's table in one group."""

    row: int
    group: int
    index: int
    page: int


class Load(Struct, frozen=True):
    """Write an adapter's weights into a slot of the device."""

    slot: int
    adapter: Adapter


class Draft(Struct):
    """A guess of a row's tokens from position `start` on. Tokens at positions that have a known token are ignored."""

    row: int
    start: int
    tokens: list[int]


class Span(Struct, gc=False):
    """Compute `count` tokens of a row's sequence from position `start` on: keys and values, and the requested outputs.

    While drafts are in flight, `start` is an upper bound: the device starts at the row's last known token, or at
    `start` if that is earlier. Tokens after the last known token are drafts.

    samples  number of sampled positions: a token is sampled after each of the span's last `samples` tokens. The first
             sample is kept, and each further sample if the draft before it equals the sample that it anticipated
    scores   number of prompt tokens to score: those that directly follow each of the span's first `scores` tokens
    pools    number of the span's first tokens that pooling reads; the span with the prompt's last token ends it
    routes   number of the span's first tokens whose experts are reported
    """

    row: int
    start: int
    count: int
    samples: int
    scores: int = 0
    pools: int = 0
    routes: int = 0

    @property
    def drafts(self) -> int:
        """Number of the span's tokens that are drafts: all sampled positions but the first follow a draft."""
        return self.samples - 1 if self.samples else 0


class StepPlan(Struct):
    """One step: loads first, then joins, grants and drafts, then all spans in one forward pass."""

    number: int
    joins: list[Join]
    grants: list[Grant]
    spans: list[Span]
    loads: list[Load] = []
    drafts: list[Draft] = []

    @property
    def tokens(self) -> int:
        return sum(span.count for span in self.spans)


class StepResult(Struct):
    """The outputs of a step's spans, in the plan's order.

    accepted         number of kept samples of each span; 0 if the span does not sample or has failed
    tokens           the kept samples, span after span
    logprobs         by span index, one per kept sample, if requested
    prompt_logprobs  by span index, one per scored token
    pooled           by span index: the numbers of a prompt that ends in the span; of tasks by token, a row for each
                     token that the span pools, except the tokens that the request skips
    mu               by span index: mirostat's state after the sampled token
    routed           by span index: the experts of the span's first `routes` tokens
    expert_loads     number of tokens that chose each expert, in a sampled step: [layers, experts] int32, little-endian;
                     empty in other steps
    failed           by span index: the fault, if only the span's sequence failed (staging, non-finite logits, sampling)
    """

    accepted: list[int]
    tokens: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    pooled: dict[int, Pooled] = {}
    mu: dict[int, float] = {}
    routed: dict[int, RoutedExperts] = {}
    expert_loads: bytes = b""
    failed: dict[int, Fault] = {}
