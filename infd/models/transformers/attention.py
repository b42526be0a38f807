"""What transformers calls in place of attention: infd's, over the pages of the step at hand.

A modelling file hands the keywords of its forward pass down to its attention
layers, and these to the function registered under the name in the model's
config. The step travels as one of those keywords, so nothing here has a state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from torch.nn import functional as F
from transformers import AttentionInterface

if TYPE_CHECKING:
    from torch import Tensor, nn

    from infd.models.base import Batch

NAME = "infd"  # no mask is registered under it, so transformers makes none


class Step(Struct, frozen=True):
    """One forward pass. group_of: by layer, the page group that it is in."""

    batch: Batch
    group_of: tuple[int, ...]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    infd_step: Step,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, H, V] of a layer's query [1, H, T, D], key [1, K, T, D] and value [1, K, T, V], V <= D.

    Windows and causality are the plan's; `survey.py` has seen to it that the layer asks for the same.
    """
    layer: Any = module.layer_idx
    infd_step.batch.beat()
    plan, pages = infd_step.batch.attention[infd_step.group_of[layer]], infd_step.batch.cache[layer]
    width, narrower = query.shape[-1], value.shape[-1]
    if narrower < width:  # pages hold keys and values of one size; zeros behind a value come out as zeros
        value = F.pad(value, (0, width - narrower))
    q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
    plan.write(k, v, pages)
    out = plan.run(q, pages, scale=width**-0.5 if scaling is None else scaling, softcap=softcap)
    return out[None, ..., :narrower], None


AttentionInterface.register(NAME, attend)
