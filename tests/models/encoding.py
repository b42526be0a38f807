"""Tiny encoders with random weights, created by transformers, and a pass over several texts at once."""

from __future__ import annotations

import json
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from infd.kernels.select import select
from infd.models import registry
from infd.models.base import Batch, SampledBatch
from infd.pooling import read
from infd.weights.checkpoint import Checkpoint
from infd.weights.load import load
from tests.kernels.paging import CPU
from tests.models.driving import Heap

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

    from infd.kernels.ops import Ops
    from infd.models.base import Model
    from infd.pooling.reading import Task

VOCAB = 199
PAD = 1  # the padding token's id; texts do not contain it
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_LOCAL = {
    "global_attn_every_n_layers": 2,
    "local_attention": 8,
    "cls_token_id": 0,
    "sep_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}
# (model_type, settings that differ from _SIZES) by the variant's name
ENCODERS = MappingProxyType(
    {
        "bert": ("bert", {"pad_token_id": 0}),
        "bert-relu": ("bert", {"pad_token_id": 0, "hidden_act": "relu", "type_vocab_size": 3}),
        "roberta": ("roberta", {"type_vocab_size": 1}),
        "xlm-roberta": ("xlm-roberta", {"type_vocab_size": 1, "pad_token_id": 3, "hidden_act": "gelu_new"}),
        "camembert": ("camembert", {"type_vocab_size": 1}),
        "distilbert": ("distilbert", {"dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 4}),
        "electra": ("electra", {"embedding_size": 32}),
        "electra-wide": ("electra", {"embedding_size": 48}),
        "mpnet": ("mpnet", {"max_position_embeddings": 300}),
        "nomic-bert": ("nomic_bert", {}),
        "gte": ("gte", {"type_vocab_size": 2}),
        "modernbert": ("modernbert", _LOCAL),
        "modernbert-biases": (
            "modernbert",
            {**_LOCAL, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_pooling": "mean"},
        ),
        "eurobert": ("eurobert", {"num_key_value_heads": 2, "classifier_pooling": "mean", "mask_token_id": 4}),
    }
)


def make(variant: str, directory: Path, head: str = "AutoModel", **overrides: Any) -> Path:
    """Save a variant's checkpoint into `directory` and return `directory`. A variant's weights are reproducible.

    head  the auto class of transformers, which says which head the model has
    """
    import transformers

    kind, settings = ENCODERS[variant]
    config = transformers.AutoConfig.for_model(kind, **{**_SIZES, **settings, **overrides})
    model = getattr(transformers, head).from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(variant.encode()))
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name.lower():
                tensor.normal_(0.0 if name.endswith("bias") else 1.0, 0.3, generator=generator)
            elif name.endswith("bias"):
                tensor.normal_(0.0, 0.3, generator=generator)
            elif "embedding" in name:
                tensor.normal_(0.0, 1.0, generator=generator)
            elif "relative_attention_bias" in name:
                tensor.normal_(0.0, 2.0, generator=generator)
            else:
                tensor.normal_(0.0, 1.4 * tensor.shape[1] ** -0.5, generator=generator)
    model.save_pretrained(directory)
    return directory


def make_m3(directory: Path) -> Path:
    """Save an encoder of bge-m3's files: an embedding of the first token, and two pickled layers for tokens."""
    make("xlm-roberta", directory, pad_token_id=PAD)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"name": path, "path": path, "type": f"sentence_transformers.models.{kinds[path]}"} for path in kinds]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling/config.json").write_text('{"pooling_mode_cls_token": true}')
    torch.manual_seed(5)
    torch.save(torch.nn.Linear(48, 48).state_dict(), directory / "colbert_linear.pt")
    sparse = torch.nn.Linear(48, 1)
    sparse.bias.data -= 0.5  # so that the logits of some tokens are negative, and their weights 0
    halves = {name: each.half() for name, each in sparse.state_dict().items()}
    torch.save(halves, directory / "sparse_linear.pt")
    return directory


def oracle(directory: Path, head: str = "AutoModel") -> PreTrainedModel:
    """Load a checkpoint with transformers, in float32 and without fused attention."""
    import transformers

    kind = getattr(transformers, head)
    return kind.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def load_encoder(
    directory: Path,
    *,
    ops: Ops | None = None,
    dtype: torch.dtype = torch.float32,
    changed: Mapping[str, Any] = MappingProxyType({}),
    task: Task = "auto",
) -> Model:
    """Load a checkpoint as the daemon does. changed: replaces keys of its config.json."""
    with Checkpoint(directory) as checkpoint:
        ops, config = ops or select(CPU, dtype), {**checkpoint.config, **changed}
        if registry.is_implemented(config):
            registry.check_dimensions(config)
        pooling = read(directory, config, task=task)
        model = registry.build(
            config, ops, dtype=dtype, device=CPU, max_len=128, stored=checkpoint.tensors, pooling=pooling
        )
        load(model, checkpoint, Heap(CPU))
    return model


def text(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    """Return random tokens, none of which is a special one."""
    return torch.randint(5, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def encode(
    model: Model,
    texts: Sequence[Sequence[int]],
    seconds: Sequence[int | None] = (),
    *,
    read: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return the hidden states [tokens, hidden] of texts computed in one pass.

    seconds  by text, the position at which the second text of a pair begins; empty: no text is a pair
    read     by text, the position of the only token whose hidden state is returned, through Batch.sampled
    """
    lengths = [len(each) for each in texts]
    count = sum(lengths)
    padding = max(0, model.least_rows - count)
    types = None
    if seconds:
        begins = [length if second is None else second for second, length in zip(seconds, lengths, strict=True)]
        types = torch.tensor(
            [int(at >= begin) for begin, length in zip(begins, lengths, strict=True) for at in range(length)]
            + [0] * padding
        )
    batch = Batch(
        tokens=torch.tensor([token for each in texts for token in each] + [0] * padding),
        positions=torch.tensor([at for length in lengths for at in range(length)] + [0] * padding),
        attention=[],
        cache=[],
        offsets=[0, *np.cumsum(lengths).tolist()],
        types=types,
    )
    if read is not None:
        begins = [0, *np.cumsum(lengths).tolist()]
        tokens = [begin + position for begin, position in zip(begins, read, strict=False)]
        repeated = max(0, model.least_rows - len(tokens))
        tokens += tokens[-1:] * repeated
        batch.sampled = SampledBatch(torch.tensor(tokens), None, padding=repeated, indices=tokens)
        lengths, count = [1] * len(texts), len(texts)
    with torch.inference_mode():
        return list(model.forward(batch)[:count].split(lengths))
