"""Measure the mean square of each input of a model's linear layers over a calibration text.

transformers computes the model, in bfloat16. An error of a weight matters as much as its input is large; see `imatrix`
of llama.cpp, which weights errors alike.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any, Final

import torch

from infd.errors import CheckpointError, InputMalformed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

MOST_TOKENS: Final = 2**15
MOST_BYTES: Final = 32 * MOST_TOKENS
SPAN: Final = 512  # tokens computed together
LEAST_TOKENS: Final = 64


def measure(directory: Path, text: Path, progress: Callable[[int, int], None]) -> dict[str, Tensor]:
    """Return the mean square of each input of each linear module of the text decoder, float32 [inputs].

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

    for name, module in decoder.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(f"{name}.weight"))
    with torch.inference_mode():
        for first in range(0, len(tokens), SPAN):
            decoder(tokens[None, first : first + SPAN], use_cache=False)
            progress(min(first + SPAN, len(tokens)), len(tokens))
    # An input that is always 0 here keeps a little weight, so that its column is not ignored.
    return {name: (found / len(tokens)).clamp(min=1e-12) for name, found in sums.items()}
