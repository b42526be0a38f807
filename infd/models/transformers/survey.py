"""Find out what a model asks of attention, by running its code once on tensors without storage.

Config files spell windows, scales, caps and exceptions in a hundred ways; the
modelling code is what counts. So a few tokens go through it with an attention
function that takes notes and a mask that describes itself. Whatever infd's
attention could not give is a reason to refuse the model before a byte of its
weights is read.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from msgspec import Struct
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

NAME = "infd-survey"
TOKENS = 5
EXPERTS_WITHOUT_VALUES = "batched_mm"  # of the ways to compute experts, the one that takes no decision from values
# Of the keywords of an attention function, those that change nothing here or are noted.
UNDERSTOOD = frozenset({"sliding_window", "softcap", "position_ids", "use_cache", "dropout"})


class Asked(Struct, frozen=True, kw_only=True):
    """What one layer wants of attention. window: how many tokens a query sees, itself included."""

    layer: int
    kv_heads: int
    key_size: int
    window: int | None


class Surveyed(NamedTuple):
    """What every layer asks for, in order, and the hidden states of a few tokens, without storage."""

    layers: list[Asked]
    hidden: Tensor


class Notes:
    """What the layers asked for, in order, and what stands against it."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.reasons: list[str] = []


class Pattern(Tensor):
    """A mask that knows which keys a query at `PROBED` sees. Whatever a model computes from it does not."""

    PROBED = 2**20  # beyond every window
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    sees: Callable[[int], bool]


def survey(model: Any, decoder: Any) -> Surveyed:
    """Run `decoder`, the part of a model that turns tokens into hidden states. Raises CheckpointError."""
    notes = Notes()
    experts, model.config._experts_implementation = model.config._experts_implementation, EXPERTS_WITHOUT_VALUES
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    with refusing("its code does not run over transformers' attention interface"):
        hidden = decoder(
            input_ids=ids,
            position_ids=ids,
            attention_mask=torch.ones_like(ids),  # none would make transformers look for packed texts, in values
            use_cache=False,
            infd_step=notes,
        ).last_hidden_state
    model.config._experts_implementation = experts
    for reason in (*notes.reasons, *_mismatches(notes.asked, model.config.num_hidden_layers)):
        raise CheckpointError(reason)
    return Surveyed(sorted(notes.asked, key=lambda asked: asked.layer), hidden)


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Refuse a model for whatever its code may raise."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{reason} ({type(error).__name__}: {error})") from error


def _note(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    infd_step: Notes | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Stand in for attention."""
    if infd_step is None:
        raise CheckpointError("it does not hand the keywords of its forward pass down to attention")
    layer: Any = getattr(module, "layer_idx", None)
    window = sliding_window or None
    faults = [*_faults(query, key, value, others), *_mask_faults(attention_mask, window)]
    infd_step.reasons += [f"layer {layer} {fault}" for fault in faults]
    infd_step.asked.append(Asked(layer=layer, kv_heads=key.shape[1], key_size=key.shape[3], window=window))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _faults(query: Tensor, key: Tensor, value: Tensor, others: dict[str, Any]) -> Iterable[str]:
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        yield f"has {query.shape[1]} heads of queries, {key.shape[1]} of keys, {value.shape[1]} of values"
    if query.shape[3] != key.shape[3] or value.shape[3] > key.shape[3]:
        yield f"has queries of size {query.shape[3]}, keys of {key.shape[3]}, values of {value.shape[3]}"
    if key.shape[2] != TOKENS:
        yield f"attends to {key.shape[2]} keys where {TOKENS} tokens are computed"
    for name, given in others.items():
        neutral = given is None or given is False or (name == "is_causal" and given is True)
        if name not in UNDERSTOOD and not neutral:
            yield f"asks attention for {name!r}, which infd's does not know"


def _mask_faults(mask: Tensor | None, window: int | None) -> Iterable[str]:
    if not isinstance(mask, Pattern):
        yield "has a mask of its own making"
        return
    at = Pattern.PROBED
    first = 0 if window is None else max(0, at - window + 1)
    seen = {first, (first + at) // 2, at}
    hidden = {at + 1, at + TOKENS} | ({first - 1, 0} if first else set())
    if not all(map(mask.sees, seen)) or any(map(mask.sees, hidden)):
        yield f"sees other tokens than {'all' if window is None else f'the {window} that end with'} its own"


def _mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Any], **_: Any) -> Pattern:
    """Stand in for the making of a mask. `mask_function` tells of (batch, head, query, key) whether the key is seen."""
    zero, at = torch.tensor(0), torch.tensor(Pattern.PROBED)
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta").as_subclass(Pattern)
    mask.sees = lambda key: bool(mask_function(zero, zero, at, torch.tensor(key)))
    return mask


def _mismatches(asked: list[Asked], layers: int) -> Iterable[str]:
    without = set(range(layers)) - {each.layer for each in asked}
    if without:
        yield f"{len(without)} of its {layers} layers do not attend through transformers' attention interface"
    elif len(asked) != layers:
        yield f"it attends {len(asked)} times in {layers} layers; infd's cache has one place a layer"
    elif len({(each.kv_heads, each.key_size) for each in asked}) > 1:
        yield "its layers have keys of different shapes; infd's pages have one shape for all"


AttentionInterface.register(NAME, _note)
AttentionMaskInterface.register(NAME, _mask)
