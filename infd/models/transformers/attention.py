"""infd's paged attention, registered as an attention implementation of transformers.

A modelling file passes the keyword arguments of its forward pass down to its attention layers, which pass them to the
function registered under the config's attention name. A ForwardPass is one of these arguments, so this module needs no
global state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from torch.nn import functional as F
from transformers import AttentionInterface

if TYPE_CHECKING:
    from torch import Tensor, nn

    from infd.models.base import Batch

NAME = "infd"  # no mask function has this name, so transformers builds no mask


class ForwardPass(Struct, frozen=True):
    """The keyword argument `infd_pass` of one forward pass. group_of: index of the page group, by layer."""

    batch: Batch
    group_of: tuple[int, ...]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    infd_pass: ForwardPass,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return [1, T, H, V] of a layer's query [1, H, T, D], key [1, K, T, D] and value [1, K, T, V], V <= D.

    The plan applies windows and causality. `survey.py` has verified that the layer's mask expresses nothing else.
    """
    layer: Any = module.layer_idx
    infd_pass.batch.beat()
    plan, pages = infd_pass.batch.attention[infd_pass.group_of[layer]], infd_pass.batch.cache[layer]
    width, narrower = query.shape[-1], value.shape[-1]
    if narrower < width:  # in pages, keys and values have equal sizes; the padding is dropped from the result
        value = F.pad(value, (0, width - narrower))
    q, k, v = (heads[0].transpose(0, 1).contiguous() for heads in (query, key, value))
    plan.write(k, v, pages)
    out = plan.run(q, pages, scale=width**-0.5 if scaling is None else scaling, softcap=softcap)
    return out[None, ..., :narrower], None


AttentionInterface.register(NAME, attend)
