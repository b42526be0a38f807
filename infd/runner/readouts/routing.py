"""The readout that reports the experts that tokens chose. The pass writes them, only in steps that have such tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infd.request import RoutedExperts
from infd.runner.expert_loads import allocate_routes
from infd.runner.readouts.readout import Reading, Readout

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.models.base import Batch
    from infd.request import ExpertSizes
    from infd.runner.readouts.readout import Selection
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Join, Span, StepResult

    Array = npt.NDArray[Any]


class Routes(Reading):
    """The experts of tokens of one step.

    tokens  by span: index in the plan, and number of tokens
    rows    [M, layers, chosen] int16, span after span
    """

    def __init__(self, tokens: Sequence[tuple[int, int]], rows: Tensor) -> None:
        self._tokens = tokens
        self._rows = rows

    def sample(self, mask: Array | None) -> None:
        """No-op: experts do not depend on the mask."""

    def download(self, staging: Staging) -> None:
        self._rows = staging.down(self._rows)

    def read(self, result: StepResult) -> None:
        rows, end = self._rows.numpy().astype("<i2", copy=False), 0
        _, layers, chosen = rows.shape
        for span, count in self._tokens:
            begin, end = end, end + count
            result.routed[span] = RoutedExperts(layers, chosen, rows[begin:end].tobytes())


class Routing(Readout):
    """Computes `request.Route`."""

    narrows = False

    def __init__(self, sizes: ExpertSizes) -> None:
        self._sizes = sizes
        self._routes: Tensor | None = None  # of the step that is being issued

    def stage(self, joins: Sequence[Join]) -> None:
        """No-op: a span says whether its experts are reported."""

    def select(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[int]:
        return [token for i, span in enumerate(spans) for token in range(offsets[i], offsets[i] + span.routes)]

    def tap(self, batch: Batch) -> None:
        self._routes = allocate_routes(batch, self._sizes)

    def compute(self, spans: Sequence[Span], selection: Selection, hidden: Tensor) -> Routes:
        assert self._routes is not None
        routes, self._routes = self._routes, None
        tokens = [(number, span.routes) for number, span in enumerate(spans) if span.routes]
        return Routes(tokens, routes[selection.index])
