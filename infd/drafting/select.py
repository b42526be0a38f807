"""Choose how tokens are drafted: by the settings, and by a request's prediction and grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.drafting.drafter import NO_DRAFTS
from infd.drafting.forced import ForcedDrafter
from infd.drafting.ngram import NgramDrafting
from infd.drafting.prediction import PredictionDrafter
from infd.drafting.suffix import SuffixDrafting

if TYPE_CHECKING:
    from infd.config import SchedulerConfig
    from infd.drafting.drafter import Drafter, Drafting
    from infd.request import Request


class ByRequest:
    """Implements Drafting: drafts come from a request's prediction, from its grammar, or from another Drafting."""

    def __init__(self, drafting: Drafting) -> None:
        self.most = drafting.most
        self._drafting = drafting

    def drafter(self, request: Request, root: bytes) -> Drafter:
        if request.prediction:  # all drafts come from it, because usage counts them
            return PredictionDrafter(request.prediction, len(request.prompt))
        drafter = self._drafting.drafter(request, root)
        return drafter if request.constraint is None else ForcedDrafter(drafter)


def drafting(settings: SchedulerConfig) -> Drafting:
    """Return the Drafting that the settings select."""
    match settings.speculative:
        case "ngram":
            return ByRequest(NgramDrafting(settings.speculative_tokens))
        case "suffix":
            return ByRequest(SuffixDrafting(settings.speculative_tokens, settings.speculative_bytes))
    return NO_DRAFTS
