"""Count, in one of PERIOD steps, how many tokens choose each expert. Other steps compute and copy nothing for it.

Captured steps are not counted. If the last layer computes sampled tokens alone, it counts these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from infd.runner.readouts.readout import Reading

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from infd.models.base import Batch
    from infd.request import ExpertSizes
    from infd.runner.staging import Staging
    from infd.scheduler.plan import StepResult

    Array = npt.NDArray[Any]

PERIOD: Final = 64


def allocate_routes(batch: Batch, sizes: ExpertSizes) -> Tensor:
    """Make the pass write the experts that its tokens choose; return Batch.routes, which is -1 where it writes none."""
    if batch.routes is None:
        shape = (len(batch.tokens), sizes.layers, sizes.chosen)
        batch.routes = torch.full(shape, -1, dtype=torch.int16, device=batch.tokens.device)
    return batch.routes


class Loads(Reading):
    """The counts of one step: [layers x experts] int64."""

    def __init__(self, counts: Tensor) -> None:
        self._counts = counts

    def sample(self, mask: Array | None) -> None:
        """No-op: experts do not depend on the mask."""

    def download(self, staging: Staging) -> None:
        self._counts = staging.down(self._counts)

    def read(self, result: StepResult) -> None:
        result.expert_loads = self._counts.numpy().astype("<i4").tobytes()


class LoadSampler:
    """Chooses the steps that are counted."""

    def __init__(self, sizes: ExpertSizes) -> None:
        self._sizes = sizes
        self._steps = 0

    def tap(self, batch: Batch) -> bool:
        """Return whether the step is counted; its pass then writes Batch.routes."""
        counted = self._steps % PERIOD == 0
        self._steps += 1
        if counted:
            allocate_routes(batch, self._sizes)
        return counted

    def count(self, batch: Batch, tokens: int) -> Loads:
        """Count the choices of the pass's first `tokens` tokens; the others are padding."""
        assert batch.routes is not None
        layers, experts = self._sizes.layers, self._sizes.experts
        routes = batch.routes[:tokens].to(torch.int64)
        place = torch.arange(layers, device=routes.device)[:, None] * experts + routes
        # What was not written is counted apart, at the end.
        place = torch.where(routes < 0, layers * experts, place)
        return Loads(place.flatten().bincount(minlength=layers * experts + 1)[: layers * experts])
