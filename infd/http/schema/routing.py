"""The experts that the tokens of a choice chose, as chat and completion answers report them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

if TYPE_CHECKING:
    from infd.request import RoutedExperts as Values


class RoutedExperts(Struct, kw_only=True):
    """An array of prompt and answer without the answer's last token, for which no expert is computed.

    shape  tokens, layers with experts, experts that a token chooses in a layer
    data   the experts' indices, in the order in which the router chose them: base64 of little-endian numbers of `dtype`
    """

    dtype: Literal["int16"] = "int16"
    shape: Annotated[list[int], Meta(min_length=3, max_length=3)]
    data: bytes


def routed_experts(values: Values | None) -> RoutedExperts | UnsetType:
    if values is None:
        return UNSET
    return RoutedExperts(shape=[values.tokens, values.layers, values.chosen], data=values.values)
