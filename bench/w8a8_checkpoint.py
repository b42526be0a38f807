"""Convert a plain checkpoint to W8A8 in vLLM's format: int8 weights per channel, dynamic int8 activations per token.

    python bench/w8a8_checkpoint.py DIR DIR-w8a8

Linear layers are rounded to nearest without calibration, which suffices to measure speed. The format is
compressed-tensors' int-quantized, preset W8A8: each `weight` has a `weight_scale` in the weight's dtype. Embeddings,
lm_head and norms are unchanged.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Iterator

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


def quantized(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, with names, that replace this tensor."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight" or tensor.dim() != 2 or layer.endswith(("embed_tokens", "lm_head")):
        yield name, tensor
        return
    largest = tensor.float().abs().amax(dim=1, keepdim=True)
    scale = (largest / 127).clamp(min=torch.finfo(tensor.dtype).tiny).to(tensor.dtype)
    # Divide by the scale as stored: a scale rounded down would map the largest weight beyond 127.
    yield f"{layer}.weight", (tensor.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    yield f"{layer}.weight_scale", scale


def make(plain: Path, directory: Path) -> None:
    """Write all weights into one file and their format into config.json; copy the other files."""
    directory.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(plain.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                tensors.update(quantized(name, file.get_tensor(name)))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for file in plain.iterdir():
        if ".safetensors" not in file.suffixes and file.name != "config.json":
            shutil.copy(file, directory)
    config = json.loads((plain / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plain", type=Path)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    make(arguments.plain, arguments.directory)


if __name__ == "__main__":
    main()
