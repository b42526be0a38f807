"""Run a decoder of transformers as a `Model`: transformers' layers over infd's attention, cache and weights.

The modelling code computes each step as one sequence: all tokens packed in a batch of one, with their positions and
without a mask. Only infd's attention separates the sequences.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from infd.errors import CheckpointError
from infd.kernels.families.matrices import LEAST_ROWS
from infd.models.base import PageTensor
from infd.models.heads import pooling_layers
from infd.models.layers.attention import page_groups
from infd.models.transformers import attention
from infd.models.transformers.admission import admit
from infd.models.transformers.survey import NAME, refusing, survey
from infd.models.transformers.weights import declare
from infd.scheduler.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from infd.kernels.families.stack import StepBuffers, StepMemory
    from infd.models.base import Batch, PassAdapters, PoolingHead
    from infd.models.blueprint import Blueprint
    from infd.models.parameter import Parameter
    from infd.pooling.settings import Reduction
    from infd.request import PoolTask


class TransformersModel:
    """A decoder of transformers. Implements `base.Model`."""

    skips_unsampled = False  # transformers' last layer cannot drop tokens after attention
    experts = None  # transformers' code does not report its choices

    def __init__(self, config: Mapping[str, Any], blueprint: Blueprint) -> None:
        """Build the model that config.json describes, and survey it. Raises CheckpointError if infd cannot run it."""
        self._head = _build(*admit(config), blueprint.dtype)
        self._decoder = _decoder(self._head)
        surveyed = survey(self._head, self._decoder)
        self._head.config._attn_implementation = attention.NAME
        # If a padding token is set, some models search the tokens of every step for it, to warn of a missing mask.
        self._head.config.pad_token_id = None
        compute_tables(self._head, blueprint.device)
        self.generates = not blueprint.pooling.tasks
        headless = not self.generates and not blueprint.pooling.label_tokens
        self.unread = declare(self._head, blueprint, self._decoder if headless else None)
        self.parameters = blueprint.parameters
        self.least_rows = LEAST_ROWS
        self.targets = blueprint.targets  # empty: adapters need infd's own Linear
        self.cache_scales: dict[int, Parameter] = {}  # empty: checkpoint names of scales differ by architecture
        _stand_in(self._head, self._decoder)

        with refusing("its head does not run on hidden states alone"):
            logits = self.logits(surveyed.hidden[0])
        self.vocab_size: int = logits.shape[-1]
        self.logits_dtype = logits.dtype
        self._pooling_head = None if self.generates else self._layers(blueprint, surveyed.hidden.shape[-1])
        windows = [each.window for each in surveyed.layers]
        self._windows = [None if window is None or window >= blueprint.max_len else window for window in windows]
        self._kv_heads = surveyed.layers[0].kv_heads
        self._row = blueprint.ops.attention.row(surveyed.layers[0].key_size, blueprint.dtype)
        self.dtype = blueprint.dtype
        groups = enumerate(page_groups(self._windows, 1))
        group_of = {layer: index for index, group in groups for layer in group.layers}
        self._group_of = tuple(group_of[layer] for layer in range(len(windows)))

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        return CacheLayout(page_groups(self._windows, page_tokens))

    def page_tensors(self, page_tokens: int) -> tuple[PageTensor, ...]:
        size, dtype = self._row
        shape = (self._kv_heads, page_tokens, size)
        return PageTensor("k", shape, dtype), PageTensor("v", shape, dtype)

    def forward(self, batch: Batch) -> Tensor:
        step = attention.ForwardPass(batch, self._group_of)
        out = self._decoder(
            input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False, infd_pass=step
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        logits: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def fused(self, memory: StepMemory, buffers: StepBuffers) -> None:
        return None

    def embedder(self, reduction: Reduction, most: int) -> None:
        return None

    def pooling_head(self, task: PoolTask) -> PoolingHead | None:
        return None if task == "token_embed" else self._pooling_head

    def _layers(self, blueprint: Blueprint, hidden: int) -> PoolingHead | None:
        """Declare the layers after pooling."""
        pooling = blueprint.pooling
        if not pooling.label_tokens:
            return pooling_layers(blueprint, hidden)
        if max(pooling.label_tokens) >= self.vocab_size:
            raise CheckpointError(
                f"label tokens {[*pooling.label_tokens]}: the vocabulary has {self.vocab_size} tokens"
            )
        return _TokenLogits(self, pooling.label_tokens)


class _TokenLogits:
    """See heads.TokenLogits. Implements base.PoolingHead."""

    def __init__(self, model: TransformersModel, tokens: tuple[int, ...]) -> None:
        self._model, self._tokens = model, list(tokens)

    def __call__(self, vectors: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        logits = self._model.logits(vectors.to(self._model.dtype))[:, self._tokens].float()
        return logits[:, 1:] - logits[:, :1] if len(self._tokens) == 2 else logits


class _DecoderStub(nn.Module):
    """Replaces the decoder in the module tree, so that the head's own scales and caps run on hidden states."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class _Hidden:
    """A decoder's output: hidden states, and None for every other field that a head may read."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _build(model: Any, config: Any, dtype: torch.dtype) -> Any:
    """Return the model on the meta device."""
    with refusing("transformers cannot build it"), torch.device("meta"):
        try:
            return model._from_config(config, dtype=dtype, attn_implementation=NAME).eval()
        except KeyError as error:
            if error.args != (NAME,):
                raise
            reason = "its attention does not use transformers' attention interface"
            raise CheckpointError(reason) from error


def _decoder(head: Any) -> Any:
    """Return the submodule that maps tokens and positions to hidden states. Raises CheckpointError."""
    for part in (head.get_decoder(), head.base_model):
        if part is not head and "position_ids" in inspect.signature(part.forward).parameters:
            break
    else:
        raise CheckpointError("it has no decoder that takes the position of each token")
    for name, module in part.named_modules():
        if "position" in name and getattr(module, "padding_idx", None) is not None:
            raise CheckpointError("its positions start behind the padding token's id, as in encoders")
    return part


def compute_tables(head: Any, device: torch.device) -> None:
    """Allocate and compute the buffers that no checkpoint contains, such as rotary frequencies."""
    loaded = head.state_dict(keep_vars=True)
    for tensor in loaded.values():
        tensor._is_hf_initialized = True
    tables = [(name, table) for name, table in head.named_buffers() if name not in loaded]
    for name, table in tables:
        owner, _, attribute = name.rpartition(".")
        # If initialize_weights does not fill a table of floats, NaN makes the first step fail.
        fill = torch.nan if table.is_floating_point() else 0
        setattr(head.get_submodule(owner), attribute, torch.full_like(table, fill, device=device))
    with refusing("transformers cannot compute its tables"):
        head.initialize_weights()


def _stand_in(head: Any, decoder: nn.Module) -> None:
    """Replace the decoder in the head's module tree by a _DecoderStub."""
    name = next(name for name, module in head.named_modules() if module is decoder)
    head.set_submodule(name, _DecoderStub())
