"""The tensors that a quantized copy of a checkpoint has, and which of them are quantized."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from infd.errors import CheckpointError
from infd.kernels.reference.int8 import QuantizedMatrix
from infd.kernels.select import insisting, quantized, select
from infd.models import registry
from infd.models.config import architecture
from infd.models.parameter import Matrix, MatrixStack
from infd.pooling import read as read_pooling
from infd.pooling import weight_files
from infd.quantize.schemes import SCHEMES
from infd.quantize.stacks import Piece, pieces
from infd.weights.load import check
from infd.weights.stored import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from infd.models.base import Model
    from infd.quantize.schemes import Scheme
    from infd.weights.checkpoint import Checkpoint


class Plan(NamedTuple):
    """The tensors to write.

    pieces    tensors to write in place of a stored tensor, by its name and theirs; others are written as they are
    matrices  shapes of those to quantize, by name
    """

    pieces: dict[str, dict[str, Piece]]
    matrices: dict[str, tuple[int, ...]]


def plan(checkpoint: Checkpoint, name: str) -> Plan:
    """Return the tensors to write for the scheme of this name, with stacks of experts divided.

    The matrices to quantize are those that `infd start --quantization` would quantize.

    Raises CheckpointError if the checkpoint is quantized already, incomplete, or of a model that transformers' code
    computes, or if the scheme cannot quantize a matrix.
    """
    _require_unquantized(checkpoint)
    try:
        model = _model(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.directory}: {error}") from error
    check(model, checkpoint)
    found = Plan({}, {})
    for parameter in model.parameters:
        matrices = isinstance(parameter, Matrix | MatrixStack) and isinstance(parameter.form, QuantizedMatrix)
        for source in parameter.sources:
            if not matrices and source.view is None:
                continue
            stored = checkpoint.tensors[source.name]
            assert isinstance(stored, StoredTensor)
            for piece in pieces(source, stored):
                found.pieces.setdefault(source.name, {})[piece.name] = piece
                if matrices:
                    found.matrices[piece.name] = piece.shape
    _require_groups(checkpoint, found.matrices, SCHEMES[name], name)
    return found


def _require_unquantized(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint is quantized already."""
    text = checkpoint.config.get("text_config")
    for table in (checkpoint.config, text if isinstance(text, dict) else {}):
        if found := table.get("quantization_config") or table.get("compression_config"):
            method = found.get("quant_method", "compressed-tensors") if isinstance(found, dict) else found
            raise CheckpointError(
                f"{checkpoint.directory} is quantized already ({method}); name the checkpoint it was made from"
            )


def _model(checkpoint: Checkpoint) -> Model:
    """Return the model without weights, whose matrices to quantize have the form of int8. Raises CheckpointError."""
    config = checkpoint.config
    if not registry.is_implemented(config):
        raise CheckpointError(
            f"config.json: {architecture(config)} is computed by transformers' code, whose weights infd does not"
            " quantize"
        )
    device = torch.device("cpu")  # only tables such as rotary angles are allocated
    ops = select(device, torch.float32, insisting("reference", quantized("int8", "none")))
    pooling = read_pooling(checkpoint.directory, config)
    if files := weight_files(checkpoint.directory):
        raise CheckpointError(
            f"{next(iter(files))}: layers after pooling are not copied; serve the checkpoint with --quantization"
            " instead"
        )
    return registry.build(
        config, ops, dtype=torch.float32, device=device, max_len=64, stored=checkpoint.tensors, pooling=pooling
    )


def _require_groups(checkpoint: Checkpoint, matrices: Mapping[str, tuple[int, ...]], scheme: Scheme, name: str) -> None:
    """Raise CheckpointError if the inputs of a matrix are not divided into the scheme's groups."""
    for matrix, (_, inputs) in sorted(matrices.items()):
        if scheme.group is not None and inputs % scheme.group:
            raise CheckpointError(
                f"{checkpoint.directory}: {matrix} has {inputs} inputs, which --scheme {name} cannot divide into groups"
                f" of {scheme.group}; choose {' or '.join(each for each, it in SCHEMES.items() if it.group is None)}"
            )


def ignored(checkpoint: Checkpoint, matrices: Container[str]) -> list[str]:
    """Return the modules whose matrices are not quantized, as compressed-tensors names them."""
    plain = [name for name, each in checkpoint.tensors.items() if len(each.shape) == 2 and name not in matrices]
    names = {name.removesuffix(".weight") for name in plain if name.endswith(".weight") and "embed_tokens" not in name}
    if "text_config" in checkpoint.config:  # transformers and vLLM name the modules of such models otherwise
        return ["re:.*lm_head", *sorted(f"re:.*{re.escape(name)}" for name in names if not name.endswith("lm_head"))]
    return sorted({"lm_head", *names})
