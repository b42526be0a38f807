"""Make tokens less likely, or impossible: some rows of a step's logits, in place."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from infd.kernels.families.draw import History


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Make every token impossible whose bit is 0. bits [n, ceil(vocab / 32)] int32, lowest bit first."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    with _some(logits, rows) as part:
        part.masked_fill_(allowed == 0, float("-inf"))


def penalize_repetition(logits: Tensor, rows: Tensor, history: History, penalty: Tensor) -> None:
    """Divide positive logits of the tokens of prompt and answer by the penalty, and multiply negative ones by it."""
    tokens = _tokens(history)
    # The first token stands in for those that do not count: writing its logit again changes nothing.
    seen = torch.where(_places(tokens) < history.end[:, None], tokens, tokens[:, :1])
    with _some(logits, rows) as part:
        picked = part.gather(1, seen)
        factor = penalty[:, None]
        part.scatter_(1, seen, torch.where(picked > 0, picked / factor, picked * factor))


def penalize_answer(logits: Tensor, rows: Tensor, history: History, presence: Tensor, frequency: Tensor) -> None:
    """Subtract, for each token of the answer, presence once and frequency as often as it occurs."""
    tokens = _tokens(history)
    place = _places(tokens)
    generated = (place >= history.prompt[:, None]) & (place < history.end[:, None])
    with _some(logits, rows) as part:
        counts = torch.zeros_like(part).scatter_add_(1, tokens, generated.to(part.dtype))
        part.sub_(counts * frequency[:, None] + (counts > 0) * presence[:, None])


def _tokens(history: History) -> Tensor:
    """Return the tokens [n, longest] int64 of each row's sequence."""
    return history.tokens[history.sequence, : history.longest].to(torch.int64)


def _places(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device)


@contextmanager
def _some(logits: Tensor, rows: Tensor) -> Iterator[Tensor]:
    """Give the logits of some rows, to be changed in place."""
    if len(rows) == len(logits):  # all of them, since they ascend
        yield logits
    else:
        part = logits[rows]
        yield part
        logits.index_copy_(0, rows, part)
