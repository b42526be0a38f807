"""Decide how many tokens a step computes: fewer if the step decodes, or if an earlier step did not fit in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.scheduler.resources import Resource

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence

RECOVERY_STEPS: Final = 64  # steps committed after a halving before the budget is doubled
MANY_STARTING: Final = 8  # if more requests wait for their first token, crowded_tokens is the budget of a mixed step


class TokenBudget(Resource):
    """The token budget of a step. Admission takes no tokens; each span reduces `remaining`.

    If prompts must not be divided, several share a step only up to mixed_tokens.

    limit      maximum tokens of the next step: Capacity.step_tokens, halved when a step did not fit in memory
    remaining  tokens of the step being planned that are not yet spent
    """

    def __init__(self, capacity: Capacity) -> None:
        self.limit = self.remaining = self._largest = capacity.step_tokens
        self._divisible = capacity.layout.divisible
        self._packed = capacity.mixed_tokens or self._largest
        self._mixed = (capacity.mixed_tokens if self._divisible else None) or self._largest
        self._crowded = (capacity.crowded_tokens if self._divisible else None) or self._mixed
        self._steps_since_halving = 0  # steps committed since the last halving

    def mixed(self, decoding: int, starting: int) -> int:
        """Return how many prompt tokens a step may compute in addition to its decoding tokens.

        decoding  tokens of the decoding sequences in this step, drafts included
        starting  number of requests that wait for their first token and could be computed

        The caller applies `limit` too. Prompts fill the step up to a size: mixed_tokens, or crowded_tokens if
        `starting` exceeds MANY_STARTING. But prompts may always use (size + decoding) / 2 tokens, because a token costs
        less in a larger step.
        """
        if not decoding:
            return self.limit
        size = self._crowded if starting > MANY_STARTING else self._mixed
        return max(size - decoding, (size + decoding) // 2)

    def halve(self, tokens: int) -> None:
        """Set `limit` to half the tokens of a step that did not fit in memory, or to half of `limit` if that is less.

        tokens  the step's cost, at least 2
        """
        self.limit = min(tokens, self.limit) // 2
        self._steps_since_halving = 0

    def fits(self, seq: Sequence, reserved: Many[Sequence]) -> bool:
        if self._divisible:
            return self.remaining > 0
        used, tokens = self.limit - self.remaining, len(seq.tokens)
        return tokens <= self.remaining and (not used or used + tokens <= self._packed)

    def settle(self, plan: StepPlan) -> None:
        """Double a halved budget after RECOVERY_STEPS steps."""
        if self.limit == self._largest:
            return
        self._steps_since_halving += 1
        if self._steps_since_halving >= RECOVERY_STEPS:
            self.limit = min(2 * self.limit, self._largest)
            self._steps_since_halving = 0
