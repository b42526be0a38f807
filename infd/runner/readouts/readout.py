"""Readouts: the outputs of a step that are computed from hidden states, one class for each kind of want.

The runner has a tuple of readouts and knows none by name. A further readout
(pooling, routed experts) is a member of `request.Want`, a field of `Span`, a
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

    index            [M + padding] int64: indices into the packed step. A readout that narrows repeats the last index
                     if matrix products need more rows; other readouts have no padding
    rows, positions  [M + padding] int64: of these tokens
    adapters         of these tokens; None if no token of the step has an adapter
    narrowed         whether the model returns the hidden states of these tokens alone
    """

    index: Tensor
    rows: Tensor
    positions: Tensor
    adapters: AdaptedRows | None
    narrowed: bool

    def of(self, hidden: Tensor) -> Tensor:
        """Select the hidden states of these tokens.

        hidden  [T, width], or if narrowed [M + padding, width]: the model's output
        ->      [M + padding, width]
        """
        return hidden if self.narrowed else hidden[self.index]


class Readout(Protocol):
    """Computes one kind of want. Used on the device thread only.

    narrows  whether it reads at most one token per span, so that the last layer may compute these tokens alone
    """

    narrows: ClassVar[bool]

    def stage(self, joins: Sequence[Join]) -> None:
        """Store the parameters of joining rows for this readout."""

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        """Return the tokens to read, as ascending indices into the packed step; span i begins at offsets[i]."""

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> Reading:
        """Issue all work that needs no mask. Called only if `select` returned tokens.

        selection  the tokens that `select` returned
        hidden     see Selection.of
        """


class Reading(Protocol):
    """A readout's output for one step, first on the device, then on the host."""

    def sample(self, mask: Array | None) -> None:
        """Issue the remaining work, once the step's mask is known."""

    def download(self, staging: Staging) -> None:
        """Start copies to the host. Only then may another step be issued before `read`."""

    def read(self, result: StepResult) -> None:
        """Write the output into the step's result. The device has finished the step."""
