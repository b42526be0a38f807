"""Find the encoded matrices of a checkpoint.

quantization_config names the format; the stored tensors determine which matrices are encoded. A module whose only
tensor is a floating-point weight is not encoded, even if the config lists the module as quantized. If a tensor belongs
to no encoding and the model does not use it, loading refuses the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from infd.weights.encodings.awq import AWQ
from infd.weights.encodings.bitsandbytes import BitsAndBytes
from infd.weights.encodings.compressed_tensors import CompressedTensors
from infd.weights.encodings.config import refusal
from infd.weights.encodings.fp8 import Float8
from infd.weights.encodings.gptq import GPTQ
from infd.weights.encodings.modelopt import ModelOpt
from infd.weights.encodings.module import Module
from infd.weights.encodings.mxfp4 import MXFP4
from infd.weights.stored import EncodedTensor, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from infd.weights.stored import Encoding

Contents = dict[str, "StoredTensor | EncodedTensor"]


class Format(Protocol):
    """One quantization format.

    suffixes  endings of tensor names: a tensor's name is its module's name, followed by one of these
    matrix    ending of a matrix's name: the name is the module's name, followed by this
    """

    @property
    def suffixes(self) -> tuple[str, ...]: ...
    @property
    def matrix(self) -> str: ...

    def encode(self, module: Module) -> Encoding | None:
        """Return the encoding of a module's matrix; None if the matrix is not encoded. Raises CheckpointError."""


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = MappingProxyType(
    {
        "awq": AWQ,
        "bitsandbytes": BitsAndBytes,
        "compressed-tensors": CompressedTensors,
        "fbgemm_fp8": Float8,
        "fp8": Float8,
        "gptq": GPTQ,
        "modelopt": ModelOpt,
        "modelopt_fp4": ModelOpt,
        "mxfp4": MXFP4,
    }
)


def read_format(config: Mapping[str, Any]) -> Format | None:
    """Return the format that quantization_config names; None if there is no quantization_config.

    In a multimodal config.json, `text_config` may contain the quantization_config. Raises CheckpointError.
    """
    text = config.get("text_config")
    table = config.get("quantization_config") or config.get("compression_config")
    if table is None and isinstance(text, dict):
        table = text.get("quantization_config")
    if table is None:
        return None
    if not isinstance(table, dict):
        raise refusal(f"expected an object, found {table!r}")
    method = table.get("quant_method", "compressed-tensors" if "config_groups" in table else None)
    if not isinstance(method, str) or (make := FORMATS.get(method)) is None:
        raise refusal(
            f"quant_method {method!r} is not supported; supported: {', '.join(FORMATS)}; unquantized weights of the"
            " model are served too, and quantized while loading with --quantization"
        )
    return make(table)


def encoded(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]) -> Contents:
    """Return `tensors`, with the stored tensors of each encoded matrix replaced by one EncodedTensor.

    Raises CheckpointError; an error about a tensor names the file, the tensor and the reason.
    """
    contents: Contents = dict(tensors)
    if (found := read_format(config)) is None:
        return contents
    endings = sorted(found.suffixes, key=len, reverse=True)
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in tensors.items():
        ending = next((each for each in endings if name.endswith(each)), None)
        if ending is not None and name != ending:
            modules.setdefault(name.removesuffix(ending), {})[ending] = stored
    for name, parts in modules.items():
        encoding = found.encode(Module(name, parts))
        if encoding is None:
            continue
        for part in (*encoding.parts, *encoding.unused):
            del contents[part.name]
        matrix = name + found.matrix
        if matrix in contents:
            stored = tensors[matrix]
            raise refusal(f"{stored.file.path.name}: {matrix} is stored both plainly and as {encoding.label}")
        contents[matrix] = EncodedTensor(matrix, encoding)
    return contents


def labels(contents: Mapping[str, StoredTensor | EncodedTensor]) -> Counter[str]:
    """Return the number of encoded matrices by label, and by how the inputs of their products are quantized."""
    encodings = [each.encoding for each in contents.values() if each.encoding is not None]
    return Counter(f"{each.label}{f', inputs {each.inputs.scheme}' if each.inputs else ''}" for each in encodings)
