"""Readouts: the outputs that a step computes from hidden states, one class per member of `request.Want`.

The runner iterates over a tuple of readouts. A new readout
(pooling, routed experts) adds a member to `request.Want`, a field to `Span`, a
field to `StepResult`, a class to this package, and an entry to the tuple.
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

    index            [M + padding] int64: indices into the packed step. Only a readout that narrows has padding: the
                     last index, repeated if matrix products need more rows
    rows, positions  [M + padding] int64: the tokens' rows and positions
    adapters         the tokens' adapters; None if no token of the step uses an adapter
    narrowed         whether the model returns only the selected tokens' hidden states
    """

    index: Tensor
    rows: Tensor
    positions: Tensor
    adapters: AdaptedRows | None
    narrowed: bool

    def of(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the selected tokens.

        hidden  [T, width], or if narrowed [M + padding, width]: the model's output
        ->      [M + padding, width]
        """
        return hidden if self.narrowed else hidden[self.index]


class Readout(Protocol):
    """Computes one member of `request.Want`. Used on the device thread only.

    narrows  whether at most one token per span is read, so that the last layer may compute only the selected tokens
    """

    narrows: ClassVar[bool]

    def stage(self, joins: Sequence[Join]) -> None:
        """Store this readout's parameters for the rows of joining sequences."""

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        """Return the tokens to read, as ascending indices into the packed step; span i begins at offsets[i]."""

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> Reading:
        """Issue all work that needs no mask. Called only if `select` returned tokens.

        selection  the tokens that `select` returned
        hidden     see Selection.of
        """


class Reading(Protocol):
    """A readout's output for one step: on the device until `download`, then on the host."""

    def sample(self, mask: Array | None) -> None:
        """Issue the work that needs the step's mask."""

    def download(self, staging: Staging) -> None:
        """Start copies to the host. Called before another step is issued."""

    def read(self, result: StepResult) -> None:
        """Write the output into the step's result. Called after the device has finished the step."""
