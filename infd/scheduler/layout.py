"""The meaning of a cache page, shared by model, scheduler and runner.

A layout is a list of page groups. A group consists of layers that keep the keys
and values of the same tokens. All groups share one pool of page ids, because a
page has the same size in bytes in every group. Each sequence has a page table for
each group. An encoder caches nothing, so its layout has no groups.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.request import ExpertSizes, PoolTask
from infd.rounding import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable


class Chunk(Struct, frozen=True):
    """A visible range: a query attends to the tokens of its chunk, up to its own. Chunks have `tokens` tokens each."""

    tokens: int


class PageGroup(Struct, frozen=True, kw_only=True):
    """Layers that keep the same tokens.

    layers       indices of the model's layers, in order; the i-th layer uses the i-th slot of a page
    page_tokens  tokens in one page
    window       number of tokens to which a query attends, its own included; None: all tokens
    chunk        tokens of the chunks to which attention is confined, a multiple of page_tokens; None: no chunks
    """

    layers: tuple[int, ...]
    page_tokens: int
    window: int | None = None
    chunk: int | None = None

    def pages_needed(self, computed: int, planned: int) -> range:
        """Return the page indices that must exist while tokens [computed, planned) are computed."""
        return range(self.pages_droppable(computed), ceil_div(planned, self.page_tokens))

    def pages_droppable(self, computed: int) -> int:
        """Return the number of leading pages to which no query at position `computed` or later attends."""
        if self.chunk is not None:
            return computed // self.chunk * self.chunk // self.page_tokens
        if self.window is None:
            return 0
        return max(0, computed - self.window + 1) // self.page_tokens

    def first_missing(self, boundary: int, cached: Callable[[int], bool]) -> int | None:
        """Return the first token of the first page that must be cached to start computing at `boundary`, but is not.

        None: computing can start at `boundary`. Otherwise computing cannot start at any token after the returned token,
        up to `boundary`.
        """
        missing = next((page for page in self.pages_needed(boundary, boundary) if not cached(page)), None)
        return None if missing is None else missing * self.page_tokens


class Regimes(Struct, frozen=True, kw_only=True):
    """How rotary angles depend on a sequence's length, in addition to token positions.

    Each sequence has a regime, a number; short sequences have regime 0. In different regimes, the angles of a position
    may differ, so a sequence shares pages only with sequences of the same regime.

    outgrown     a sequence of more than `outgrown` tokens has regime 1, from its first token on; a sequence that grows
                 beyond `outgrown` is recomputed (longrope)
    prompt_over  a sequence with a prompt of more than `prompt_over` tokens has the prompt's length as its regime: the
                 angles of prompt tokens depend on that length, the angles of generated tokens only on their positions
                 (dynamic)
    """

    outgrown: int | None = None
    prompt_over: int | None = None

    @property
    def several(self) -> bool:
        """Whether there are regimes other than 0."""
        return self.outgrown is not None or self.prompt_over is not None

    def of(self, prompt: int, length: int) -> int:
        """Return the regime of a sequence of `length` tokens, whose first `prompt` tokens are the prompt."""
        if self.prompt_over is not None and prompt > self.prompt_over:
            return prompt
        return int(self.outgrown is not None and length > self.outgrown)

    def longest(self, regime: int) -> int | None:
        """Return the maximum number of tokens that may be computed in a regime; None: any number."""
        return None if regime else self.outgrown


class CacheLayout(Struct, frozen=True):
    """All page groups of a model.

    divisible  whether a prompt may be computed in chunks; an encoder's prompt may not
    regimes    how rotary angles depend on a sequence's length
    """

    groups: tuple[PageGroup, ...]
    divisible: bool = True
    regimes: Regimes = Regimes()

    @property
    def alignment(self) -> int:
        """Distance in tokens between two boundaries at each of which a page ends in every group."""
        return lcm(*(group.page_tokens for group in self.groups))

    def peak_pages(self, tokens: int, step_tokens: int) -> int:
        """Return the maximum number of pages that a sequence of `tokens` tokens holds at once.

        step_tokens  maximum tokens of the chunks in which the sequence is computed
        """
        return sum(self._peak(group, tokens, step_tokens) for group in self.groups)

    @staticmethod
    def _peak(group: PageGroup, tokens: int, step_tokens: int) -> int:
        pages, visible = ceil_div(tokens, group.page_tokens), group.chunk or group.window
        if visible is None:
            return pages
        # The pages of the visible range and of one step. The first and the last page may be used in part.
        return min(pages, ceil_div(visible + step_tokens, group.page_tokens) + 1)


class Capacity(Struct, frozen=True, kw_only=True):
    """The executor's limits, known once the model is loaded.

    pages           page ids 1..pages may be granted; page 0 is reserved for padding
    rows            maximum number of running sequences
    step_tokens     token budget of a step
    mixed_tokens    token budget of a step that also decodes, or if prompts are not divisible, of a step with several;
                    None: step_tokens
    crowded_tokens  token budget of a mixed step while many prompts wait for their first token; None: mixed_tokens
    score_cost      budget tokens that a prompt token costs if it is scored, because its logits are also computed
    max_model_len   maximum tokens of a sequence, prompt and generated tokens together
    vocab_size      token ids are 0..vocab_size - 1
    row_costs       duration of decoding steps: pairs of rows and seconds, by ascending rows; empty: not measured
    generates       whether the model samples tokens, and scores prompts; an encoder does neither
    pools           the tasks of pooling; empty: the model only generates
    pools_last      whether one row of numbers depends on the hidden state of the prompt's last token alone, so that
                    cached pages may be read
    experts         of the model's layers with experts; None: the model has none, or does not report their choices
    """

    layout: CacheLayout
    pages: int
    rows: int
    step_tokens: int
    max_model_len: int
    vocab_size: int
    score_cost: int = 1
    mixed_tokens: int | None = None
    crowded_tokens: int | None = None
    row_costs: tuple[tuple[int, float], ...] = ()
    generates: bool = True
    pools: tuple[PoolTask, ...] = ()
    pools_last: bool = False
    experts: ExpertSizes | None = None
