"""Measure the mean square of each input of a model's linear layers over a calibration text.

transformers computes the model, in bfloat16. An error of a weight matters as much as its input is large; see `imatrix`
of llama.cpp, which weights errors alike.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from infd.errors import CheckpointError, InputMalformed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

MOST_TOKENS: Final = 2**15
MOST_BYTES: Final = 32 * MOST_TOKENS
SPAN: Final = 512  # tokens computed together
LEAST_TOKENS: Final = 64
# The mean of a layer's inputs counts as this many tokens of each expert, which few tokens may choose.
LAYER_TOKENS: Final = 16
# Names of an expert's matrices in checkpoints with a tensor for each expert. {}: transformers' name of the module that
# stacks the experts, and the expert's index. The second spelling is that of Mixtral and Phi.
SPELLINGS: Final = (
    ("{}.{}.gate_proj.weight", "{}.{}.up_proj.weight", "{}.{}.down_proj.weight"),
    ("{}.{}.w1.weight", "{}.{}.w3.weight", "{}.{}.w2.weight"),
)


def measure(directory: Path, text: Path, progress: Callable[[int, int], None]) -> dict[str, Tensor]:
    """Return the mean square of each input of each linear module and expert of the text decoder, float32 [inputs].

    The keys are names of weights within the decoder, such as "layers.0.mlp.up_proj.weight": transformers names the
    decoder itself otherwise than some checkpoints.

    Reads the first MOST_BYTES of the text, and computes at most MOST_TOKENS of its tokens.

    progress  called with (tokens computed, tokens to compute)

    Raises InputMalformed; CheckpointError if transformers cannot load the model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with text.open("rb") as file:  # the last character may be cut
            content = codecs.getincrementaldecoder("utf-8")().decode(file.read(MOST_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise InputMalformed(f"{text} cannot be read: {error}") from error
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, **local)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **local)
    except Exception as error:
        raise CheckpointError(f"{directory}: transformers cannot load it for calibration: {error}") from error
    tokens = tokenizer(content, return_tensors="pt", verbose=False).input_ids[0, :MOST_TOKENS]
    if len(tokens) < LEAST_TOKENS:
        raise InputMalformed(f"{text}: {len(tokens)} tokens; calibration needs at least {LEAST_TOKENS}, better 10,000")
    model.train(False)
    decoder = model.get_decoder()
    sums: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def add(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            squares = inputs[0].detach().float().flatten(0, -2).square().sum(0)
            sums[name] = sums[name] + squares if name in sums else squares

        return add

    experts: dict[str, Experts] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(f"{name}.weight"))
        elif _stacks_experts(module):
            experts[name] = Experts(module)
    with torch.inference_mode():
        for first in range(0, len(tokens), SPAN):
            decoder(tokens[None, first : first + SPAN], use_cache=False)
            progress(min(first + SPAN, len(tokens)), len(tokens))
    means = {name: found / len(tokens) for name, found in sums.items()}
    for name, each in experts.items():
        means |= each.means(name)
    # An input that is always 0 here keeps a little weight, so that its column is not ignored.
    return {name: found.clamp(min=1e-12) for name, found in means.items()}


def _stacks_experts(module: torch.nn.Module) -> bool:
    """Return whether a module of transformers stacks experts whose rows of gate precede those of up."""
    both, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(both, torch.Tensor) or not isinstance(down, torch.Tensor) or not hasattr(module, "act_fn"):
        return False
    return both.dim() == 3 and both.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])


class Experts:
    """The sums of squares of the inputs of a layer's experts: of gate and up, and of down."""

    def __init__(self, module: torch.nn.Module) -> None:
        experts, outputs, inner = (int(size) for size in module.get_parameter("down_proj").shape)
        self._tokens = torch.zeros(experts, 1)
        self._outer, self._inner = torch.zeros(experts, outputs), torch.zeros(experts, inner)
        module.register_forward_pre_hook(self._add)

    def _add(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        """Add the inputs of a call: states [T, hidden], and the experts that they choose [T, k]."""
        states, chosen = inputs[0].flatten(0, -2), inputs[1].flatten(0, -2)
        for expert in sorted({*chosen.flatten().tolist()}):
            rows = states[(chosen == expert).any(-1)]
            gate, up = functional.linear(rows, module.gate_up_proj[expert]).chunk(2, -1)
            self._tokens[expert] += len(rows)
            self._outer[expert] += rows.float().square().sum(0)
            self._inner[expert] += (module.act_fn(gate) * up).float().square().sum(0)

    def means(self, name: str) -> dict[str, Tensor]:
        """Return the mean squares by matrix. name: of the module."""
        outer, inner = (
            (sums + LAYER_TOKENS * sums.sum(0) / self._tokens.sum()) / (self._tokens + LAYER_TOKENS)
            for sums in (self._outer, self._inner)
        )
        places = dict.fromkeys((name, name.replace(".mlp.", ".block_sparse_moe.")))
        return {
            spelling.format(place, expert): mean
            for place in places
            for gate, up, down in SPELLINGS
            for expert in range(len(outer))
            for spelling, mean in ((gate, outer[expert]), (up, outer[expert]), (down, inner[expert]))
        }
