"""Decide how many tokens a step may hold: fewer beside decoding sequences, and after a step that did not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from infd.scheduler.resources import Resource

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from infd.scheduler.layout import Capacity
    from infd.scheduler.plan import StepPlan
    from infd.scheduler.sequence import Sequence

CALM_STEPS: Final = 64  # committed after a halving before the budget is doubled again
CROWD: Final = 8  # requests without a first token; more of them make crowded_tokens the budget of a mixed step


class TokenBudget(Resource):
    """A sequence takes nothing at its admission: each of its spans draws on `remaining`.

    limit      tokens of the next step: Capacity.step_tokens, halved when a step did not fit into memory
    remaining  tokens that the step being planned can still take
    """

    def __init__(self, capacity: Capacity) -> None:
        self.limit = self.remaining = self._largest = capacity.step_tokens
        self._divisible = capacity.layout.divisible
        self._mixed = (capacity.mixed_tokens if self._divisible else None) or self._largest
        self._crowded = (capacity.crowded_tokens if self._divisible else None) or self._mixed
        self._calm = 0  # steps committed since the last halving

    def mixed(self, decoding: int, starting: int) -> int:
        """Return how many prompt tokens a step takes that also decodes for so many sequences, if it has room.

        starting  requests that wait for their first token, and could be computed

        Prompts fill the step up to mixed_tokens, or add half as many tokens as decode, whichever is more. Decoding
        sequences wait for one step, a crowd of prompts for all steps to come, and a token costs less in a larger step.
        """
        if not decoding:
            return self.limit
        size = self._crowded if starting > CROWD else self._mixed
        return max(size - decoding, (size + decoding) // 2)

    def halve(self, tokens: int) -> None:
        """Allow half as many tokens as a step that did not fit into memory; it counted as so many, two at least."""
        self.limit = min(tokens, self.limit) // 2
        self._calm = 0

    def fits(self, seq: Sequence, reserved: Many[Sequence]) -> bool:
        return self.remaining > 0 and (self._divisible or len(seq.tokens) <= self.remaining)

    def settle(self, plan: StepPlan) -> None:
        """Double a halved budget after CALM_STEPS steps."""
        if self.limit == self._largest:
            return
        self._calm += 1
        if self._calm >= CALM_STEPS:
            self.limit = min(2 * self.limit, self._largest)
            self._calm = 0
