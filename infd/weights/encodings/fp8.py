"""fp8 as DeepSeek and Qwen store it: each block has a scale, which multiplies in spite of its name `weight_scale_inv`.

Without weight_block_size, a matrix has one scale (AutoFP8) or a scale for each row (FBGEMM). Inputs are quantized too:
with a stored scale, or as the weights are, in blocks of inputs or by token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from infd.input_scheme import InputScheme
from infd.weights.encodings.compressed_tensors import label, scale_grid, stored_inputs
from infd.weights.encodings.config import convert
from infd.weights.encodings.module import FLOATS
from infd.weights.encodings.scaled import Numbers, Scaled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.encodings.module import Module

Count = Annotated[int, Meta(ge=1, le=2**24)]


class Config(Struct, frozen=True):
    quant_method: str
    weight_block_size: tuple[Count, Count] | None = None
    fmt: Literal["e4m3", "e5m2"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] | None = "dynamic"
    scale_fmt: str | None = None


class Float8:
    """The fp8 format. Implements `Format` of find.py."""

    suffixes = (".weight", ".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale")
    matrix = ".weight"

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check `table`, a quantization_config. Raises CheckpointError."""
        config = convert(dict(table), Config)
        rows = config.quant_method == "fbgemm_fp8"
        self._block = config.weight_block_size or ((1, 0) if rows else (0, 0))
        self._inputs = InputScheme(
            "e4m3",
            inputs=config.weight_block_size[1] if config.weight_block_size else 0,
            static=config.activation_scheme == "static" and not config.weight_block_size,
            powers=config.scale_fmt == "ue8m0",
        )

    def encode(self, module: Module) -> Scaled | None:
        """See `Format.encode` in find.py."""
        if module.is_plain():
            return None
        words = module.take(".weight", ("F8_E4M3", "F8_E5M2"), (-1, -1))
        name = (
            ".weight_scale" if ".weight_scale" in module and ".weight_scale_inv" not in module else ".weight_scale_inv"
        )
        # transformers' own writer names a static scale activation_scale.
        inputs = ".activation_scale" if ".activation_scale" in module else ".input_scale"
        scales = scale_grid(module, self._block, words.shape, (*FLOATS, "F8_E8M0"), name)
        return Scaled(
            label=label("fp8", scales, None, None),
            shape=words.shape,
            numbers=Numbers(stored=words, type="e4m3" if words.dtype == "F8_E4M3" else "e5m2"),
            scales=scales,
            inputs=stored_inputs(module, self._inputs, inputs),
            unused=module.present(".input_scale", ".activation_scale"),
        )
