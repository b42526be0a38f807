"""Run an encoder of transformers, or a decoder without causality, as a `Model`: one call of transformers' code a text.

transformers' encoders separate texts by padding and masks in their own ways, so that texts cannot be packed as for
infd's encoders: every text of a step is computed alone. A step of many short texts takes several times as long.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from infd.errors import CheckpointError
from infd.models.encoder import Ignored
from infd.models.heads import denses
from infd.models.transformers.admission import admit_whole_texts
from infd.models.transformers.model import compute_tables
from infd.models.transformers.survey import refusing
from infd.models.transformers.weights import declare
from infd.scheduler.layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from infd.kernels.families.stack import StepBuffers, StepMemory
    from infd.models.base import Batch, PageTensor, PassAdapters, PoolingHead
    from infd.models.blueprint import Blueprint
    from infd.models.parameter import Parameter
    from infd.pooling.settings import Reduction
    from infd.request import PoolTask

# transformers' tables of classes, by the kind of output.
CLASSES: Mapping[str, str] = {
    "embed": "MODEL_MAPPING",
    "classify": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "token_classify": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
}
PROBED = 5  # tokens of the run that shows whether the code reads token ids alone


class TransformersEncoder:
    """An encoder of transformers. Implements `base.Model`.

    The rows of a text are its tokens' hidden states. With a head for labels they are the labels' logits: those of a
    token, or of the text in each of its rows, so that the head may read any of its hidden states.
    """

    generates = False
    skips_unsampled = False
    experts = None
    logits_dtype = torch.float32
    least_rows = 1  # of a step: each text is a call of its own

    def __init__(self, config: Mapping[str, Any], blueprint: Blueprint) -> None:
        """Build the model that config.json describes. Raises CheckpointError if transformers cannot run it."""
        pooling = blueprint.pooling
        if pooling.label_tokens or pooling.token_dense or pooling.token_weight:
            raise CheckpointError("labels by tokens' logits, and layers for tokens, need one of infd's own models")
        task = "embed" if "embed" in pooling.tasks else pooling.tasks[0]
        self._labels = task != "embed"
        self._by_token = task == "token_classify"
        kind, read = admit_whole_texts(config, CLASSES[task])
        if self._labels:
            read.num_labels = len(pooling.labels)
        self._model = _build(kind, read, blueprint.dtype)
        accepted = inspect.signature(self._model.forward).parameters
        self._masked = "attention_mask" in accepted
        self._typed = "token_type_ids" in accepted and (getattr(read, "type_vocab_size", None) or 0) > 1
        compute_tables(self._model, blueprint.device)
        declare(self._model, blueprint)
        self.unread = Ignored("")  # of a head that is not computed, under any name
        self.parameters = blueprint.parameters
        self.targets = blueprint.targets  # empty: adapters need infd's own Linear
        self.cache_scales: dict[int, Parameter] = {}
        self.vocab_size: int = read.get_text_config().vocab_size
        self._denses = denses(blueprint)
        _require_positions(self._model, blueprint.max_len)

    def cache_layout(self, page_tokens: int) -> CacheLayout:
        return CacheLayout(groups=(), divisible=False)

    def page_tensors(self, page_tokens: int) -> tuple[PageTensor, ...]:
        return ()

    def forward(self, batch: Batch) -> Tensor:
        texts = []
        for first, end in pairwise(batch.offsets):
            batch.beat()
            texts.append(self._text(batch.tokens[first:end], None if batch.types is None else batch.types[first:end]))
        rows = torch.cat(texts)
        padding = len(batch.tokens) - len(rows)
        return rows if not padding else torch.cat((rows, rows.new_zeros(padding, rows.shape[1])))

    def _text(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        """Return a text's rows. types: see Batch."""
        read: dict[str, Tensor] = {"input_ids": tokens[None]}
        if self._masked:
            read["attention_mask"] = torch.ones_like(tokens)[None]
        if self._typed and types is not None:
            read["token_type_ids"] = types[None]
        out = self._model(**read)
        if not self._labels:
            hidden: Tensor = out.last_hidden_state[0]
            return hidden
        logits: Tensor = out.logits
        return logits[0] if self._by_token else logits.expand(len(tokens), -1)

    def logits(self, hidden: Tensor, adapters: PassAdapters | None = None) -> Tensor:
        raise NotImplementedError("encoders have no logits of tokens")

    def fused(self, memory: StepMemory, buffers: StepBuffers) -> None:
        return None

    def embedder(self, reduction: Reduction, most: int) -> None:
        return None

    def pooling_head(self, task: PoolTask) -> PoolingHead | None:
        return self._denses if task == "embed" else None


def _build(kind: Any, read: Any, dtype: torch.dtype) -> Any:
    """Return the model on the meta device. Raises CheckpointError if it reads more than token ids."""
    options = {"add_pooling_layer": False} if "add_pooling_layer" in inspect.signature(kind.__init__).parameters else {}
    with refusing("transformers cannot build it"), torch.device("meta"):
        model = kind._from_config(read, dtype=dtype, **options).eval()
    # Code that reads the values of tensors cannot run on the meta device, and its RuntimeError says nothing of inputs.
    with refusing("its code does not run on token ids alone"), torch.inference_mode(), suppress(RuntimeError):
        model(input_ids=torch.zeros(1, PROBED, dtype=torch.int64, device="meta"))
    return model


def _require_positions(model: nn.Module, max_len: int) -> None:
    """Raise CheckpointError if a text of max_len tokens exceeds a table of positions that begins behind padding."""
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if "position" in name and isinstance(module, torch.nn.Embedding) and padding is not None:
            most = module.num_embeddings - padding - 1
            if max_len > most:
                raise CheckpointError(f"its positions begin behind the padding token's: set --max-model-len {most}")
