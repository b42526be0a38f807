"""Divide stacked experts: compressed-tensors stores a module for each expert and projection.

llm-compressor replaces a module that stacks experts by such modules, named as below in every family, before it
quantizes; so no format has scales for a stack, and readers know these names.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from infd.models.parameter import View

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infd.models.parameter import Source
    from infd.weights.stored import StoredTensor

BOTH: Final = ("gate_proj", "up_proj")
DOWN: Final = ("down_proj",)
# By the ending of a stack's name: the projections that an expert's part consists of, and the ending of their names.
STACKS: Mapping[str, tuple[tuple[str, ...], str]] = MappingProxyType(
    {
        "experts.gate_up_proj": (BOTH, ".weight"),
        "experts.gate_up_proj_bias": (BOTH, ".bias"),
        "experts.down_proj": (DOWN, ".weight"),
        "experts.down_proj_bias": (DOWN, ".bias"),
        "input_linear.weight": (BOTH, ".weight"),
        "output_linear.weight": (DOWN, ".weight"),
        "experts.gate_proj.weight": (BOTH[:1], ".weight"),
        "experts.up_proj.weight": (BOTH[1:], ".weight"),
        "experts.down_proj.weight": (DOWN, ".weight"),
    }
)


class Piece(NamedTuple):
    """A tensor to write, and the rows of a stored tensor that it has. view: None: all rows."""

    name: str
    shape: tuple[int, ...]
    view: View | None = None


def pieces(source: Source, stored: StoredTensor) -> Iterator[Piece]:
    """Yield the tensors that have the rows of a source. A parameter has an expert's rows of gate before those of up."""
    view = source.view
    if view is None:
        yield Piece(source.name, stored.shape)
        return
    ending = max((each for each in STACKS if source.name.endswith(each)), key=len)
    projections, suffix = STACKS[ending]
    if view.step > 1:
        projections = (projections[view.first],)
    rest = stored.shape[1:-1] if view.turned else stored.shape[2:]
    rows = view.count // len(projections)
    for number, projection in enumerate(projections):
        part = View(view.index, rows, view.first + number * rows, view.step, view.turned)
        name = f"{source.name.removesuffix(ending)}experts.{view.index}.{projection}{suffix}"
        yield Piece(name, (rows, *rest), part)
