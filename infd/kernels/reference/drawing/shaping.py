"""Penalties and masks of logits, in place."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from infd.kernels.families.draw import History


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Implements families.draw.Draw.forbid."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    allowed = (bits[:, :, None] >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    with _some(logits, rows) as part:
        part.masked_fill_(allowed == 0, float("-inf"))


def penalize_repetition(logits: Tensor, rows: Tensor, history: History, penalty: Tensor) -> None:
    """Implements families.draw.Draw.penalize_repetition."""
    tokens = _tokens(history)
    # Positions past a sequence's end repeat the first token: writing one penalized logit twice changes nothing.
    seen = torch.where(_places(tokens) < history.end[:, None], tokens, tokens[:, :1])
    with _some(logits, rows) as part:
        picked = part.gather(1, seen)
        factor = penalty[:, None]
        part.scatter_(1, seen, torch.where(picked > 0, picked / factor, picked * factor))


def penalize_answer(logits: Tensor, rows: Tensor, history: History, presence: Tensor, frequency: Tensor) -> None:
    """Implements families.draw.Draw.penalize_answer."""
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
    """Yield logits[rows], and write changes back."""
    if len(rows) == len(logits):  # every row, since rows ascend
        yield logits
    else:
        part = logits[rows]
        yield part
        logits.index_copy_(0, rows, part)
