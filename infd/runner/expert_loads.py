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
        batch.routes = _unwritten(len(batch.tokens), sizes, batch.tokens.device)
    return batch.routes


def _unwritten(tokens: int, sizes: ExpertSizes, device: torch.device | None = None) -> Tensor:
    return torch.full((tokens, sizes.layers, sizes.chosen), -1, dtype=torch.int16, device=device)


class Loads(Reading):
    """The loads of one step.

    routes  Batch.routes of the step's tokens, without padding; the pass may still be to write them
    """

    def __init__(self, routes: Tensor, sizes: ExpertSizes) -> None:
        self.routes = routes
        self._sizes = sizes

    def sample(self, mask: Array | None) -> None:
        """Count the choices: the pass is issued, and experts do not depend on the mask."""
        layers, experts = self._sizes.layers, self._sizes.experts
        routes = self.routes.to(torch.int64)
        place = torch.arange(layers, device=routes.device)[:, None] * experts + routes
        # Choices that the pass has not written are counted apart, at the end.
        place = torch.where(routes < 0, layers * experts, place).flatten()
        counts = torch.zeros(layers * experts + 1, dtype=torch.int32, device=routes.device)
        # bincount would wait for the device, to learn the largest place.
        self._counts = counts.index_add_(0, place, torch.ones_like(place, dtype=torch.int32))[:-1]

    def download(self, staging: Staging) -> None:
        self._counts = staging.down(self._counts)

    def read(self, result: StepResult) -> None:
        result.expert_loads = self._counts.numpy().astype("<i4", copy=False).tobytes()


class LoadSampler:
    """Chooses the steps that are counted."""

    def __init__(self, sizes: ExpertSizes | None) -> None:
        """sizes: of the model's layers with experts; None: no step is counted."""
        self._sizes = sizes
        self._steps = 0

    def tap(self, batch: Batch, tokens: int) -> list[Loads]:
        """Return the readings that a step has for loads: one if the step is counted, and its pass writes Batch.routes.

        tokens  number of the pass's first tokens to count; the others are padding
        """
        sizes = self._counted()
        return [] if sizes is None else [Loads(allocate_routes(batch, sizes)[:tokens], sizes)]

    def take(self, tokens: int) -> Loads | None:
        """Return the loads of a step of `tokens` tokens on the host, which has no Batch; None: it is not counted."""
        sizes = self._counted()
        return None if sizes is None else Loads(_unwritten(tokens, sizes), sizes)

    def _counted(self) -> ExpertSizes | None:
        """Return the sizes if the next step is counted."""
        number, self._steps = self._steps, self._steps + 1
        return None if number % PERIOD else self._sizes
