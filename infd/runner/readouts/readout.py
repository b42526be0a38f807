"""Readouts: the outputs that a step computes from hidden states, one class per member of `request.Want`.

The runner iterates over a tuple of readouts. A new readout needs a member of `request.Want`, a field of `Span`, a field
of `StepResult`, a class in this package, and an entry in the runner's tuple.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.models.base import Batch
    from infd.runner.adapters import AdaptedRows
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Join, Span, StepResult

    Array = npt.NDArray[Any]


class Selection(Struct, dict=True):
    """The M tokens of a step that one readout reads, and padding.

    index      [M + padding] int64: indices into the packed step. If the readout narrows and matrix products need more
               than M rows, the last index is repeated as padding; otherwise there is no padding
    narrowed   whether the model returns hidden states of the selected tokens only; if so, pooling reads no indices
    adapters   the selected tokens' adapters; None if none of these tokens has an adapter
    token_row  [T] int64: the rows of the step's tokens; None: the model keeps no cache, so its readouts only pool
    position   [T] int64: their positions; None: as for token_row
    """

    index: Tensor
    narrowed: bool
    adapters: AdaptedRows | None = None
    token_row: Tensor | None = None
    position: Tensor | None = None

    @cached_property
    def rows(self) -> Tensor:
        """The selected tokens' rows, [M + padding] int64."""
        assert self.token_row is not None
        return self.token_row[self.index]

    @cached_property
    def positions(self) -> Tensor:
        """The selected tokens' positions, [M + padding] int64."""
        assert self.position is not None
        return self.position[self.index]

    def of(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of the selected tokens, padding included.

        hidden  the model's output: [T, width]; if narrowed, [M + padding, width]
        ->      [M + padding, width]
        """
        return hidden if self.narrowed else hidden[self.index]


class Readout(Protocol):
    """Computes one member of `request.Want`. Used on the device thread only.

    narrows  whether the readout reads only a few tokens of each span; the last layer may then compute these tokens only
    """

    narrows: bool

    def stage(self, joins: Sequence[Join]) -> None:
        """Store this readout's parameters for the rows of joining sequences."""

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        """Return the tokens to read, as ascending indices into the packed step; span i begins at offsets[i]."""

    def tap(self, batch: Batch) -> None:
        """Make the pass write the tensors that the readout reads beside hidden states, if there are any.

        Called only if `select` returned tokens.
        """
        return  # not abstract: most readouts read hidden states alone

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> Reading:
        """Issue the work that does not depend on the step's mask. Called only if `select` returned tokens.

        selection  the tokens that `select` returned
        hidden     see Selection.of
        """


class Reading(Protocol):
    """A readout's output for one step: on the device until `download`, then on the host."""

    def sample(self, mask: Array | None) -> None:
        """Issue the work that depends on the step's mask, a bitmask of allowed tokens; None: all tokens are allowed."""

    def download(self, staging: Staging) -> None:
        """Start copies to the host. Called before another step is issued."""

    def read(self, result: StepResult) -> None:
        """Write the output into the step's result. Called after the device has finished the step."""
