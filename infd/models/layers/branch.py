"""What a branch of a layer passes through before it is added to the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

P = ParamSpec("P")


def then(branch: Callable[P, Tensor], last: Callable[[Tensor], Tensor]) -> Callable[P, Tensor]:
    """Return the branch with one more step at its end, such as a norm."""

    def both(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        return last(branch(*args, **kwargs))

    return both


def times(factor: float) -> Callable[[Tensor], Tensor]:
    def multiply(x: Tensor) -> Tensor:
        return x * factor

    return multiply
