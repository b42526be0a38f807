"""Say how likely the tokens of prompts were.

Nothing is sampled from these logits, so they need not exist all at once: a
prompt's would fill gigabytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import Struct

from infd.kernels.families.matrices import LEAST_ROWS
from infd.request import TokenLogprobs
from infd.runner.sampling import scores

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from infd.models.base import Model
    from infd.runner.adapters import AdaptedRows
    from infd.runner.pulse import Pulse
    from infd.runner.staging import Staging

BLOCK = 256  # rows of logits at a time: 150 MiB where a vocabulary is large


class Asked(Struct, frozen=True):
    """A span whose tokens' successors are scored."""

    span: int  # its index in the plan
    tokens: int
    most: int  # how many of the most likely tokens are wanted too


class Scored(Struct):
    """Scores of the tokens of some spans, M in all.

    asked   whose they are, in order
    finite  [M] bool: whether the logits were
    rank    [M] int64: 1 where no token was likelier
    scores  of the prompt's tokens, and of the most likely ones in their places
    """

    asked: Sequence[Asked]
    finite: Tensor
    rank: Tensor
    scores: scores.Scores

    def down(self, staging: Staging) -> Scored:
        """Start copies to the host."""
        values = scores.Scores(*map(staging.down, self.scores))
        return Scored(self.asked, staging.down(self.finite), staging.down(self.rank), values)

    def read(self) -> Iterator[tuple[int, list[TokenLogprobs] | None]]:
        """Yield each span's index and its log-probabilities, None where its logits were not finite."""
        finite, rank = self.finite.tolist(), self.rank.tolist()
        chosen, top, top_ids = (values.tolist() for values in self.scores)
        end = 0
        for asked in self.asked:
            begin, end = end, end + asked.tokens
            if not all(finite[begin:end]):
                yield asked.span, None
                continue
            most = asked.most
            yield (
                asked.span,
                [
                    TokenLogprobs(chosen[n], tuple(top_ids[n][:most]), tuple(top[n][:most]), rank[n])
                    for n in range(begin, end)
                ],
            )


def score(
    model: Model,
    hidden: Tensor,
    adapters: AdaptedRows | None,
    targets: Tensor,
    asked: Sequence[Asked],
    pulse: Pulse,
) -> Scored:
    """Score the token targets[i] by the logits of hidden[i]; both [M, ...], the spans' tokens one after another.

    adapters  what the rows of `hidden` want
    """
    most = min(max(each.most for each in asked), model.vocab_size)
    finite, rank, parts = [], [], []
    for number, (block, target) in enumerate(zip(torch.split(hidden, BLOCK), torch.split(targets, BLOCK), strict=True)):
        count = len(block)
        needed = model.least_rows if adapters is None else LEAST_ROWS
        padding = block[:1].expand(max(0, needed - count), -1)
        adapted = None if adapters is None else adapters.at(number * BLOCK + np.arange(count))
        logits = model.logits(torch.cat((block, padding)), adapted)[:count]
        finite.append(logits.amax(-1).isfinite())
        rank.append(scores.rank(logits, target))
        parts.append(scores.score(logits, target, most))
        pulse.beat()
    return Scored(asked, torch.cat(finite), torch.cat(rank), scores.Scores(*map(torch.cat, zip(*parts, strict=True))))
