"""Make a W8A8 checkpoint of a plain one, as vLLM reads it: int8 weights per channel, int8 activations made per token.

    python bench/w8a8_checkpoint.py DIR DIR-w8a8

Linear layers are rounded to the nearest step, nothing is calibrated: speed does not ask for the best rounding. What it
writes is what compressed-tensors calls int-quantized, its preset W8A8: beside each `weight` a `weight_scale`, in the
weight's dtype as there. Embeddings, lm_head and norms stay as they are.
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
    """Yield what this tensor is written as."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight" or tensor.dim() != 2 or layer.endswith(("embed_tokens", "lm_head")):
        yield name, tensor
        return
    largest = tensor.float().abs().amax(dim=1, keepdim=True)
    scale = (largest / 127).clamp(min=torch.finfo(tensor.dtype).tiny).to(tensor.dtype)
    # By the scale as it is read again: rounded down, it would take the largest past 127.
    yield f"{layer}.weight", (tensor.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
    yield f"{layer}.weight_scale", scale


def make(plain: Path, directory: Path) -> None:
    """Write weights, whatever the files they were in, into one; the config says how; the rest is copied."""
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
