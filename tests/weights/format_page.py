"""infd/weights/FORMATS.md: each stored format, and what a CPU keeps of it, made of the checkpoints that tests read.

python -m tests.weights.format_page      write it
"""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import gguf
import torch

from infd.errors import CheckpointError
from infd.gguf.file import KINDS
from infd.kernels.cpu.packed import Packed
from infd.kernels.select import CANDIDATES, insisting, select
from infd.models import registry
from infd.weights.checkpoint import Checkpoint
from infd.weights.encodings.find import read_format
from infd.weights.encodings.gguf import GROUPS
from infd.weights.load import load
from tests.kernels.paging import CPU
from tests.models.driving import Heap
from tests.weights.encodings.fixtures import NAMES, WRITTEN

if TYPE_CHECKING:
    from infd.groups import Groups

FILE = Path(__file__).parents[2] / "infd" / "weights" / "FORMATS.md"
WRITERS = MappingProxyType(
    {
        "awq": "gptqmodel 7.7.0",
        "bnb": "bitsandbytes 0.50.2",
        "ct": "llmcompressor 0.14.0.1",
        "fp8": "ten lines of torch, as DeepSeek",
        "gptq": "gptqmodel 7.7.0",
        "mo": "nvidia-modelopt 0.47.0",
    }
)
GROUP: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}
TABLE: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": GROUP},
    "format": "pack-quantized",
}
REFUSED: tuple[dict[str, Any], ...] = (
    *({"quant_method": method} for method in ("hqq", "quanto", "torchao")),
    {**TABLE, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
    {**TABLE, "sparsity_config": {"format": "sparse-24-bitmask"}},
    {**TABLE, "format": "marlin-24"},
    {"quant_method": "gptq", "bits": 3},
    {"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"},
    {"quant_method": "awq", "bits": 4, "version": "gemv"},
    {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
)

HEAD = """# Which stored formats are served, and how

`python -m tests.weights.format_page` writes this page from the code and from the checkpoints in
tests/weights/encodings/written, which other software wrote (make_written.py). All of this is tested for each row:

- read: rows equal the writer's dequantized weights to the bit, logits are near (test_written.py; GGUF: test_gguf.py,
  tests/gguf/test_kept.py, against the gguf package); malformed files are refused (test_malformed_drawn.py and others);
- kept: the stored numbers stay in memory, to the bit, and native kernels multiply them (test_packed.py); else matrices
  are decoded to the activations' type, here bfloat16, for the reason given. `--exact-activations` decodes all but fp8;
- inputs: how the scheme quantizes the inputs of products, and that products do so (test_inputs.py, against
  compressed-tensors);
- LoRA: logits with an adapter equal PEFT's on the decoded weights (test_adapted.py), also on weights that are quantized
  while loading.

`infdctl ops` and `infd models` say the same of a checkpoint at hand.

## Checkpoints of safetensors
"""

DECODED = """
Decoded, although their numbers have at most eight bits:

- bitsandbytes' nf4 and fp4: the 16 numbers of nf4 are floats, and kernels' tables have int8. Rounded to the nearest
  int8 they change a matrix of normal numbers by 0.49 % (root mean square, with the best common factor, 124; the
  scheme's own error is 9.2 %, rounding to bfloat16 0.17 %), so the weights would no longer be the checkpoint's. Of
  fp4's numbers all but one are multiples of 1/96, and that one is half of it.
- bitsandbytes' int8: weights are (integer x scale) / 127, rounded twice; and the scheme computes inputs above a
  threshold in float16, while products with int8 inputs would round these most coarsely.
- ModelOpt's W4A16_AWQ where inputs are multiplied by stored factors (pre_quant_scale): no product does that before it
  quantizes inputs. Exporters fold most factors into the norm before the matrix; these matrices are kept.
"""


def page() -> str:
    """Return the page. Native kernels must be built."""
    lines = [HEAD, "| checkpoint | writer | as read, and as kept on a CPU |", "|---|---|---|"]
    lines += [f"| {name} | {WRITERS[name.partition('-')[0]]} | {'<br>'.join(_told(name))} |" for name in NAMES]
    lines += [
        "| gpt-oss | transformers' decoding (test_find.py) | mxfp4, experts: kept |",
        DECODED,
        "## GGUF",
        "",
        "Written and decoded by the gguf package 0.19.0 (K-quants and IQ4: random blocks).",
        "",
        "| type | kept as |",
        "|---|---|",
    ]
    for number in sorted(KINDS):
        name = KINDS[number].name
        lines.append(f"| {name} | {_kept(GROUPS[name]) if name in GROUPS else 'floats'} |")
    others = sorted(each.name for each in gguf.GGMLQuantizationType if int(each) not in KINDS)
    lines += [
        "",
        f"Refused by name, with the types that are served: {', '.join(others)}.",
        "",
        "`--quantization` keeps matrices that have as many bits, and quantizes others anew.",
        "",
        "## Refused by name",
        "",
        "| quantization_config | message |",
        "|---|---|",
    ]
    lines += [f"| `{json.dumps(table)}` | {_refusal(table)} |" for table in REFUSED]
    return "\n".join(lines) + "\n"


def _told(name: str) -> list[str]:
    ops = select(
        CPU,
        torch.bfloat16,
        {**CANDIDATES, **{key: insisting("native", CANDIDATES)[key] for key in ("packed", "inputs")}},
    )
    with Checkpoint(WRITTEN / name) as checkpoint:
        model = registry.build(
            checkpoint.config, ops, dtype=torch.bfloat16, device=CPU, max_len=64, stored=checkpoint.tensors
        )
        return sorted(load(model, checkpoint, Heap(CPU)))


def _kept(groups: Groups) -> str:
    form = Packed().form(256, 512, torch.bfloat16, groups)
    assert not isinstance(form, str)
    numbers = f"indices of 4 bits into the table {groups.table}" if groups.table else f"integers of {groups.bits} bits"
    scales = "scales of 8 bits, and a float16 for 256 inputs" if groups.scales == "I8" else f"{groups.scales} scales"
    return f"{numbers}, groups of {groups.inputs}, {scales}{', minima' if groups.minima else ''}"


def _refusal(table: dict[str, Any]) -> str:
    try:
        read_format({"quantization_config": table})
    except CheckpointError as error:
        return str(error).replace("|", "\\|")
    raise AssertionError(table)


if __name__ == "__main__":
    FILE.write_text(page(), encoding="utf-8")
