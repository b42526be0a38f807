"""ModelOpt's checkpoints. The dtypes and shapes of the stored tensors determine how a matrix is encoded.

The overall scale of NVFP4 multiplies; that of compressed-tensors divides. `pre_quant_scale` has a factor for each input
of a module; infd multiplies each row of the matrix, not the inputs, by these factors, so it does not quantize these
inputs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from infd.input_scheme import InputScheme
from infd.rounding import ceil_div
from infd.weights.encodings.compressed_tensors import label, mx, scale_grid, stored_inputs
from infd.weights.encodings.config import convert, refusal
from infd.weights.encodings.module import FLOATS
from infd.weights.encodings.scaled import Numbers, Scaled, Scales

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.weights.encodings.module import Module

# How each algorithm quantizes inputs; None: it does not.
ALGORITHMS: Mapping[str, InputScheme | None] = MappingProxyType(
    {
        "FP8": InputScheme("e4m3", static=True),
        "FP8_PB_WO": None,
        "FP8_PER_CHANNEL_PER_TOKEN": InputScheme("e4m3"),
        "MXFP4": InputScheme("e2m1", 32, powers=True),
        "MXFP8": InputScheme("e4m3", 32, powers=True),
        "NVFP4": InputScheme("e2m1", 16, static=True),
        "NVFP4_AWQ": InputScheme("e2m1", 16, static=True),
        "W4A16_AWQ": None,
        "W4A16_NVFP4": None,
        "W4A8_MXFP4_FP8": InputScheme("e4m3"),
        "W4A8_NVFP4_FP8": InputScheme("e4m3", static=True),
        "W8A16": None,
        "W8A8_SQ_PER_CHANNEL": InputScheme("int8"),
    }
)
SIDE = 128  # rows, and inputs, of an fp8 block


class Algorithm(Struct, frozen=True):
    quant_algo: str | None = None
    quantized_layers: dict[str, Algorithm] | None = None
    group_size: int | None = None


class Config(Algorithm, frozen=True):
    quantization: Algorithm | None = None  # set in hf_quant_config.json, which nests the other fields here


class ModelOpt:
    """The ModelOpt format. Implements `Format` of find.py."""

    suffixes = (".weight", ".weight_scale", ".weight_scale_2", ".pre_quant_scale", ".input_scale")
    matrix = ".weight"

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check `table`, a quantization_config. Raises CheckpointError."""
        config = convert(dict(table), Config)
        stated = config.quantization or config
        layers = (stated.quantized_layers or {}).values()
        mixed = stated.quant_algo == "MIXED_PRECISION"
        for each in layers if mixed else (stated,):
            if each.quant_algo is not None and each.quant_algo.upper() not in ALGORITHMS:
                supported = ", ".join(sorted(ALGORITHMS))
                raise refusal(f"quant_algo {each.quant_algo!r} is not supported; supported: {supported}")
        self._group = {name: each.group_size for name, each in (stated.quantized_layers or {}).items()}
        self._group_of_all = stated.group_size
        self._all = None if mixed or stated.quant_algo is None else ALGORITHMS[stated.quant_algo.upper()]
        self._layers = {
            name: ALGORITHMS[each.quant_algo.upper()]
            for name, each in (stated.quantized_layers or {}).items()
            if mixed and each.quant_algo is not None
        }

    def encode(self, module: Module) -> Scaled | None:
        """See `Format.encode` in find.py."""
        if module.is_plain():
            return None
        match module.dtype(".weight"), module.dtype(".weight_scale"):
            case ("F8_E4M3" | "U8", "U8" | "F8_E8M0"):
                encoding = mx(module, ".weight")
            case ("F8_E4M3", _):
                encoding = _float8(module)
            case ("U8", "F8_E4M3"):
                encoding = _nvfp4(module)
            case ("U8", _):
                encoding = _int4(module, self._group.get(module.name, self._group_of_all))
            case _:
                words = module.take(".weight", ("I8", "U8", "F8_E4M3"), (-1, -1))
                scales = scale_grid(module, (1, 0), words.shape, FLOATS)
                numbers = Numbers(stored=words, type="int")
                encoding = Scaled(
                    label=label("int8", scales, None, None), shape=words.shape, numbers=numbers, scales=scales
                )
        columns = module.find(".pre_quant_scale", FLOATS, (encoding.shape[-1],))
        scheme = self._layers.get(module.name, self._all)
        if scheme is not None and columns is not None:  # would be quantized after the multiplication
            scheme = InputScheme(f"{scheme.numbers} after pre_quant_scale", scheme.inputs)
        inputs = stored_inputs(module, scheme)
        return replace(encoding, columns=columns, inputs=inputs, unused=module.present(".input_scale"))


def _float8(module: Module) -> Scaled:
    words = module.take(".weight", ("F8_E4M3",), (-1, -1))
    outputs, inputs = words.shape
    blocks = ceil_div(outputs, SIDE), ceil_div(inputs, SIDE)
    stored = module.take(
        ".weight_scale", FLOATS, (), (1,), (outputs,), (outputs, 1), (blocks[0], 1, blocks[1], 1), blocks
    )
    if len(stored.shape) == 4 or (stored.shape == blocks and blocks[1] > 1):
        scales = Scales(stored=stored, grid=blocks, block=(SIDE, SIDE))
    elif stored.bytes and stored.shape in ((), (1,)):
        scales = Scales(stored=stored, grid=(1, 1), block=(outputs, inputs))
    else:
        scales = Scales(stored=stored, grid=(outputs, 1), block=(1, inputs))
    numbers = Numbers(stored=words, type="e4m3")
    return Scaled(label=label("fp8", scales, None, None), shape=words.shape, numbers=numbers, scales=scales)


def _nvfp4(module: Module) -> Scaled:
    words = module.take(".weight", ("U8",), (-1, -1))
    shape = words.shape[0], words.shape[1] * 2
    grid = shape[0], module.groups(shape[1], 16, words)
    scales = Scales(
        stored=module.take(".weight_scale", ("F8_E4M3",), grid),
        grid=grid,
        block=(1, 16),
        overall=module.take(".weight_scale_2", ("F32",), (), (1,)),
    )
    numbers = Numbers(stored=words, type="e2m1", bits=4)
    return Scaled(label=label("nvfp4", scales, None, None), shape=shape, numbers=numbers, scales=scales)


def _int4(module: Module, group: int | None) -> Scaled:
    """W4A16_AWQ: each byte holds the integers of two consecutive rows. group: the config's size of groups, if any."""
    words = module.take(".weight", ("U8",), (-1, -1))
    outputs, inputs = words.shape[0] * 2, words.shape[1]
    stored = module.take(".weight_scale", FLOATS, (outputs, -1))
    count = stored.shape[1]
    if inputs % count or (group is not None and group > 0 and count * group != inputs):
        size = f" of {group}" if group else ""
        module.refuse(stored, f"{inputs} inputs are not divided into {count} groups{size}")
    scales = Scales(stored=stored, grid=(outputs, count), block=(1, inputs // count))
    numbers = Numbers(stored=words, type="int", bits=4, across=True)
    return Scaled(label=label("int4", scales, None, None), shape=(outputs, inputs), numbers=numbers, scales=scales)
