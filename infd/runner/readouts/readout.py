"""What a step computes from hidden states, besides the cache: one class for each kind of want.

The runner has a tuple of readouts and knows none by name. A further readout
(pooling, routed experts) is a member of `request.Want`, a word on `Span`, a
field of `StepResult`, a class here, and an entry in that tuple.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.runner.adapters import AdaptedRows
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Join, Span, StepResult

    Array = npt.NDArray[Any]


class Selection(Struct):
    """The tokens of a step that one readout reads, M of them.

    index            [M + padding] int64: into the packed step. For a readout that narrows, the last is repeated if
                     products need more rows; others have no padding
    rows, positions  [M + padding] int64: of these tokens
    adapters         of these tokens; None if no token of the step has one
    narrowed         whether the model returns the hidden states of these tokens alone
    """

    index: Tensor
    rows: Tensor
    positions: Tensor
    adapters: AdaptedRows | None
    narrowed: bool

    def of(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of these tokens, from those that the model has returned."""
        return hidden if self.narrowed else hidden[self.index]


class Readout(Protocol):
    """Computes one kind of want. Lives on the device thread.

    narrows  whether it reads one token a span at most, so that the last layer is worth computing for these alone
    """

    narrows: ClassVar[bool]

    def stage(self, joins: Sequence[Join]) -> None:
        """Keep what the requests of joining rows want of it."""

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        """Return the tokens it reads, ascending indices into the packed step; offsets[i] is the i-th span's first."""

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> Reading:
        """Issue what needs no mask. `selection` is of what `select` returned, which was not empty."""


class Reading(Protocol):
    """What a readout computes of one step, on its way to the host."""

    def sample(self, mask: Array | None) -> None:
        """Issue the rest, once the step's mask is known."""

    def download(self, staging: Staging) -> None:
        """Start copies to the host. Only then may another step be issued before `read`."""

    def read(self, result: StepResult) -> None:
        """Write into the result of the step, which the device has computed."""
