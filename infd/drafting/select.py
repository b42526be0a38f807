"""Choose how tokens are drafted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.drafting.drafter import NO_DRAFTS
from infd.drafting.ngram import NgramDrafting
from infd.drafting.prediction import WithPredictions
from infd.drafting.suffix import SuffixDrafting

if TYPE_CHECKING:
    from infd.config import SchedulerConfig
    from infd.drafting.drafter import Drafting


def drafting(settings: SchedulerConfig) -> Drafting:
    """Return what the settings select."""
    match settings.speculative:
        case "ngram":
            return WithPredictions(NgramDrafting(settings.speculative_tokens))
        case "suffix":
            return WithPredictions(SuffixDrafting(settings.speculative_tokens, settings.speculative_bytes))
    return NO_DRAFTS
