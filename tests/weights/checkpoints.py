"""Write valid and broken safetensors files byte by byte."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def raw(header: bytes | Mapping[str, Any], body: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file's bytes. `length` overrides the header length that the file claims."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(encoded) if length is None else length).to_bytes(8, "little") + encoded + body


def safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, tensor in tensors.items():
        content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(content)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        body += content
    return raw(header, body)


def write(directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> Path:
    """Write a checkpoint in one file."""
    (directory / "config.json").write_text(json.dumps(config or {}))
    (directory / "model.safetensors").write_bytes(safetensors(tensors))
    return directory


def write_sharded(directory: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> Path:
    """Write a sharded checkpoint, by file name, with its index."""
    (directory / "config.json").write_text("{}")
    for file, tensors in shards.items():
        (directory / file).write_bytes(safetensors(tensors))
    names = {name: file for file, tensors in shards.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory
