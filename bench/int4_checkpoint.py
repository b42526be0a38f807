"""Convert a plain checkpoint to int4 in groups of 128, in the layout of GPTQ, AWQ or compressed-tensors.

    python bench/int4_checkpoint.py DIR DIR-gptq --layout gptq
    python bench/int4_checkpoint.py DIR DIR-awq --layout awq

Linear layers are rounded to nearest without calibration, which suffices to measure speed. Numbers are symmetric: the
zero point is 8. Embeddings, lm_head and norms are unchanged. The layouts are those of gptqmodel, AutoAWQ ("gemm") and
compressed-tensors ("pack-quantized").
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

GROUP = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # columns of a word of AWQ's, from its lowest bits
_COMMON = {"bits": 4, "group_size": GROUP}
FORMATS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gptq": {**_COMMON, "quant_method": "gptq", "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
        "awq": {**_COMMON, "quant_method": "awq", "version": "gemm", "zero_point": True},
        "compressed-tensors": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 4,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": GROUP,
                        "dynamic": False,
                    },
                }
            },
            "ignore": ["lm_head"],
        },
    }
)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return numbers of 0 to 15, int64 [n, k], and float16 scales [n, k / GROUP] of a matrix [n, k]."""
    groups = weight.float().view(len(weight), -1, GROUP)
    scales = (groups.abs().amax(2, keepdim=True) / 7).clamp(min=2**-14).half()
    return ((groups / scales.float()).round().clamp(-8, 7) + 8).long().flatten(1), scales.squeeze(2)


def packed(numbers: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Pack eight numbers of the last dimension into an int32, in `order` from its lowest bits."""
    words = torch.zeros(*numbers.shape[:-1], numbers.shape[-1] // 8, dtype=torch.int32)
    for bits, place in zip(range(0, 32, 4), order, strict=True):
        words |= numbers[..., place::8].int() << bits
    return words


def gptq(numbers: Tensor, scales: Tensor) -> dict[str, Tensor]:
    rows, inputs = numbers.shape
    zeros = torch.full((inputs // GROUP, rows), 7)  # as stored: one less
    return {
        "qweight": packed(numbers).T.contiguous(),
        "qzeros": packed(zeros),
        "scales": scales.T.contiguous(),
        "g_idx": (torch.arange(inputs) // GROUP).int(),
    }


def awq(numbers: Tensor, scales: Tensor) -> dict[str, Tensor]:
    rows, inputs = numbers.shape
    return {
        "qweight": packed(numbers.T.contiguous(), AWQ_ORDER),
        "qzeros": packed(torch.full((inputs // GROUP, rows), 8), AWQ_ORDER),
        "scales": scales.T.contiguous(),
    }


def compressed_tensors(numbers: Tensor, scales: Tensor) -> dict[str, Tensor]:
    return {
        "weight_packed": packed(numbers),
        "weight_scale": scales.bfloat16(),
        "weight_shape": torch.tensor(numbers.shape),
    }


LAYOUTS: Mapping[str, Callable[[Tensor, Tensor], dict[str, Tensor]]] = MappingProxyType(
    {"gptq": gptq, "awq": awq, "compressed-tensors": compressed_tensors}
)


def quantized(name: str, tensor: Tensor, layout: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, with names, that replace this tensor."""
    layer, _, kind = name.rpartition(".")
    if kind != "weight" or tensor.dim() != 2 or layer.endswith(("embed_tokens", "lm_head")):
        yield name, tensor
        return
    for part, stored in LAYOUTS[layout](*rounded(tensor)).items():
        yield f"{layer}.{part}", stored


def make(plain: Path, directory: Path, layout: str) -> None:
    """Write all weights into one file and their format into config.json; copy the other files."""
    directory.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(plain.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - the file is no dict
                tensors.update(quantized(name, file.get_tensor(name), layout))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for file in plain.iterdir():
        if ".safetensors" not in file.suffixes and file.name != "config.json":
            shutil.copy(file, directory)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = dict(FORMATS[layout])
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plain", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    arguments = parser.parse_args()
    make(arguments.plain, arguments.directory, arguments.layout)


if __name__ == "__main__":
    main()
