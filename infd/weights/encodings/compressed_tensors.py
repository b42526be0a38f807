"""compressed-tensors, the format of llm-compressor: a scheme for each group of modules.

A scheme may also quantize the inputs of the modules; `Encoding.inputs` describes how. Quantized outputs are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from infd.input_scheme import InputScheme
from infd.rounding import ceil_div
from infd.weights.encodings.config import convert, few, fitting, refusal, required
from infd.weights.encodings.module import FLOATS
from infd.weights.encodings.scaled import Numbers, Scaled, Scales
from infd.weights.stored import StoredInputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from infd.weights.encodings.module import Module, Shape
    from infd.weights.stored import StoredTensor

CLASSES = ("Linear",)  # module classes that have a weight matrix, as `targets` name them
DENSE = ("dense", "fakequant")
ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale")
_SPARSE = "sparse weights are not supported"

Count = Annotated[int, Meta(ge=1, le=2**24)]


class Weights(Struct, frozen=True):
    """How a scheme quantizes weights."""

    num_bits: Annotated[int, Meta(ge=2, le=8)] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: Annotated[int, Meta(ge=-1, le=2**24)] | None = None
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    block_structure: tuple[Count, Count] | None = None

    def block(self) -> Shape:
        """Return how many rows and inputs share a scale; 0: all. Raises CheckpointError if a size is missing."""
        grouped = self.group_size is not None and self.group_size > 0
        match self.strategy or ("group" if grouped else "tensor"):
            case "tensor":
                return (0, 0)
            case "channel":
                return (1, 0)
            case "block":
                if self.block_structure is None:
                    raise refusal("strategy block: block_structure is missing")
                return self.block_structure
            case _:
                if not grouped:
                    raise refusal("strategy group: group_size is missing")
                return (1, self.group_size or 0)


class Activations(Struct, frozen=True):
    """How a scheme quantizes the inputs of modules."""

    num_bits: Annotated[int, Meta(ge=2, le=8)] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    dynamic: bool | Literal["local"] = False
    group_size: Annotated[int, Meta(ge=-1, le=2**24)] | None = None
    strategy: str | None = None
    scale_dtype: str | None = None

    def scheme(self) -> InputScheme:
        """Raises CheckpointError for a strategy that infd does not compute.

        One dynamic scale for all tokens would depend on neighbours in the batch, so each token gets a scale.
        """
        numbers = {("float", 8): "e4m3", ("float", 4): "e2m1"}.get(
            (self.type, self.num_bits), f"{self.type}{self.num_bits}"
        )
        size = self.group_size if self.group_size is not None and self.group_size > 0 else 0
        grouped = self.strategy in ("group", "tensor_group") or (self.strategy is None and size > 0)
        if grouped and not size:
            raise refusal("input_activations, strategy group: group_size is missing")
        static = self.dynamic is False or self.dynamic == "local"
        if static and (grouped or self.strategy not in ("tensor", None)) and (numbers, grouped) != ("e2m1", True):
            raise refusal(f"input_activations: stored scales of strategy {self.strategy} are not supported")
        if self.strategy not in ("tensor", "token", "group", "tensor_group", None):
            raise refusal(f"input_activations: strategy {self.strategy!r} is not supported")
        return InputScheme(
            numbers,
            inputs=size if grouped else 0,
            static=static,
            zeros=not self.symmetric,
            powers=grouped and self.scale_dtype == "torch.uint8",
        )


class Group(Struct, frozen=True):
    """Modules that share a scheme."""

    targets: Annotated[list[str], Meta(min_length=1)]
    weights: Weights | None = None
    input_activations: Activations | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None

    def inputs(self) -> InputScheme | None:
        """Return how inputs are quantized; None: they are not. Raises CheckpointError."""
        return None if self.input_activations is None else self.input_activations.scheme()


class Config(Struct, frozen=True):
    config_groups: dict[str, Group] | None = None
    format: str | None = None
    kv_cache_scheme: Activations | None = None


class CompressedTensors:
    """The compressed-tensors format. Implements `Format` of find.py."""

    suffixes = (
        ".weight",
        ".weight_packed",
        ".weight_scale",
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_global_scale",
        *ACTIVATIONS,
    )
    matrix = ".weight"

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check `table`, a quantization_config. Raises CheckpointError."""
        required(table, {"transform_config": "rotated weights (Hadamard transforms) are not supported"})
        sparsity = table.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") not in DENSE:
            raise refusal(f"sparsity_config: {_SPARSE}")
        config = convert(dict(table), Config)
        if config.kv_cache_scheme is not None and not config.kv_cache_scheme.symmetric:
            raise refusal("kv_cache_scheme: zero points of keys and values are not supported")
        self._schemes: list[tuple[str, Weights, InputScheme | None]] = []
        for name, group in (config.config_groups or {}).items():
            if group.weights is None:
                if any(target in CLASSES for target in group.targets):
                    raise refusal(f"config_groups.{name} quantizes activations, but no weights: it is not supported")
                continue  # quantizes only activations of modules without a weight matrix, such as attention
            written = _format(group, config)
            if written not in (*_ENCODE, *DENSE):
                raise refusal(f"format {written!r} is not supported; supported: {', '.join(_ENCODE)}")
            group.weights.block()
            if written not in DENSE:
                self._schemes.append((written, group.weights, group.inputs()))
        several = [each[:2] for each in set(self._schemes)]
        if len(set(several)) < len(several):
            raise refusal("config_groups quantize equal weights with different activations: it is not supported")
        few(self._schemes)

    def encode(self, module: Module) -> Scaled | None:
        """See `Format.encode` in find.py."""
        if module.is_plain() or not self._schemes:
            return None
        return fitting(partial(_encode, module, *scheme) for scheme in self._schemes)


def _encode(module: Module, written: str, weights: Weights, scheme: InputScheme | None) -> Scaled:
    inverse = scheme is not None and scheme.inputs > 0
    scale = ".input_global_scale" if inverse else ".input_scale"
    return replace(_ENCODE[written](module, weights), inputs=stored_inputs(module, scheme, scale, inverse=inverse))


def stored_inputs(
    module: Module, scheme: InputScheme | None, scale: str = ".input_scale", *, inverse: bool = False
) -> StoredInputs | None:
    """Return how the module's inputs are quantized. Raises CheckpointError if a stored scale is missing.

    scale    suffix of the tensor with a static scale
    inverse  see StoredInputs
    """
    if scheme is None or not scheme.static:
        return None if scheme is None else StoredInputs(scheme)
    zeros = module.take(".input_zero_point", ("I8",), (1,), ()) if scheme.zeros else None
    return StoredInputs(scheme, module.take(scale, FLOATS, (1,), ()), zeros, inverse)


def _format(group: Group, config: Config) -> str:
    written = group.format or config.format or "dense"
    if written not in ("mixed-precision", "naive-quantized"):
        return written
    weights = group.weights
    assert weights is not None
    if weights.type == "int":
        return "pack-quantized" if weights.num_bits < 8 and written == "mixed-precision" else "int-quantized"
    if weights.num_bits == 8:
        return "mxfp8-quantized" if weights.group_size == 32 else "float-quantized"
    return "mxfp4-pack-quantized" if weights.group_size == 32 else "nvfp4-pack-quantized"


def _packed(module: Module, weights: Weights) -> Scaled:
    """pack-quantized: integers of 2 to 8 bits, packed in 32-bit words."""
    if weights.type != "int":
        raise refusal("pack-quantized holds integers, but weights.type is 'float'")
    bits = weights.num_bits
    words = module.take(".weight_packed", ("I32",), (-1, -1))
    stated = module.take(".weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = stated.content().cast("q" if stated.dtype == "I64" else "i")
    if outputs != words.shape[0] or inputs < 1 or ceil_div(inputs * bits, 32) != words.shape[1]:
        module.refuse(stated, f"it says [{outputs}, {inputs}], but {words.name} is {list(words.shape)}")
    scales = scale_grid(module, weights.block(), (outputs, inputs), FLOATS)
    zeros = None
    if not weights.symmetric:
        lines = ceil_div(outputs * bits, 32)
        points = module.take(".weight_zero_point", ("I32", "I8"), (lines, scales.grid[1]), scales.grid)
        if scales.block[0] != 1:
            module.refuse(points, "a zero point for several rows is not supported")
        if points.dtype == "I32":
            zeros = Numbers(stored=points, type="uint", bits=bits, offset=1 << bits - 1, across=True)
        else:
            most = 1 << bits - 1  # products subtract zero points from weights in eight bits
            if bits < 8 and not _only(points, (*range(most), *range(256 - most, 256))):
                module.refuse(points, f"these zero points are no integers of {bits} bits")
            zeros = Numbers(stored=points, type="int")
    numbers = Numbers(stored=words, type="uint", bits=bits, offset=1 << bits - 1)
    return _scaled(module, weights, numbers, (outputs, inputs), scales, zeros, (".weight_shape",))


def _integers(module: Module, weights: Weights) -> Scaled:
    """int-quantized: one int8 for each weight."""
    if weights.type != "int":
        raise refusal("int-quantized holds integers, but weights.type is 'float'")
    words = module.take(".weight", ("I8",), (-1, -1))
    scales = scale_grid(module, weights.block(), words.shape, FLOATS)
    zeros = None
    if not weights.symmetric:
        points = module.take(".weight_zero_point", ("I8",), *_shapes(scales.grid))
        zeros = Numbers(stored=points, type="int")
    return _scaled(module, weights, Numbers(stored=words, type="int"), words.shape, scales, zeros)


def _floats(module: Module, weights: Weights) -> Scaled:
    """float-quantized: fp8."""
    words = module.take(".weight", ("F8_E4M3",), (-1, -1))
    scales = scale_grid(module, weights.block(), words.shape, FLOATS)
    return _scaled(module, weights, Numbers(stored=words, type="e4m3"), words.shape, scales)


def _nvfp4(module: Module, weights: Weights) -> Scaled:
    words = module.take(".weight_packed", ("U8",), (-1, -1))
    shape = words.shape[0], words.shape[1] * 2
    grid = shape[0], module.groups(shape[1], 16, words)
    scales = Scales(
        stored=module.take(".weight_scale", ("F8_E4M3",), grid),
        grid=grid,
        block=(1, 16),
        overall=module.take(".weight_global_scale", ("F32",), (1,), ()),
        divides=True,
    )
    return _scaled(module, weights, Numbers(stored=words, type="e2m1", bits=4), shape, scales)


def _mxfp4(module: Module, weights: Weights) -> Scaled:
    return mx(module, ".weight_packed", (".weight_g_idx",))


def _mxfp8(module: Module, weights: Weights) -> Scaled:
    return mx(module, ".weight")


def mx(module: Module, suffix: str, refused: tuple[str, ...] = ()) -> Scaled:
    """Return the encoding of an MX matrix: fp4 or fp8 numbers, with an exponent as the scale of each 32 inputs.

    suffix   names the tensor that holds the numbers
    refused  suffixes of tensors that the module must not have

    Raises CheckpointError.
    """
    four = module.dtype(suffix) == "U8"
    words = module.take(suffix, ("U8", "F8_E4M3"), (-1, -1))
    shape = words.shape[0], words.shape[1] * (2 if four else 1)
    grid = shape[0], module.groups(shape[1], 32, words)
    for extra in module.present(*refused):
        module.refuse(extra, "MX formats do not reorder inputs")
    scales = Scales(
        stored=module.take(".weight_scale", ("U8", "F8_E8M0"), grid), grid=grid, block=(1, 32), exponent=True
    )
    numbers = Numbers(stored=words, type="e2m1" if four else "e4m3", bits=4 if four else 8)
    label = "mxfp4" if four else "mxfp8"
    return Scaled(
        label=label, shape=shape, numbers=numbers, scales=scales, unused=module.present(*ACTIVATIONS, ".weight_shape")
    )


_ENCODE = {
    "pack-quantized": _packed,
    "int-quantized": _integers,
    "float-quantized": _floats,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
    "mxfp8-quantized": _mxfp8,
}


def scale_grid(
    module: Module, block: Shape, shape: Shape, dtypes: tuple[str, ...], name: str = ".weight_scale"
) -> Scales:
    """Return the scales of a matrix, one for each block.

    block   numbers of rows and inputs in a block; 0: all
    shape   of the matrix, [rows, inputs]
    dtypes  accepted dtypes of the scales
    name    suffix of the tensor that holds the scales

    Raises CheckpointError if that tensor is missing, or has another dtype or a shape that does not match the blocks.
    """
    outputs, inputs = shape
    height, width = block[0] or outputs, block[1] or inputs
    grid = ceil_div(outputs, height), ceil_div(inputs, width)
    stored = module.take(name, dtypes, *_shapes(grid))
    if height == 1:
        module.groups(inputs, width, stored)
    return Scales(stored=stored, grid=grid, block=(height, width), exponent=stored.dtype == "F8_E8M0")


def _shapes(grid: tuple[int, int]) -> list[Shape]:
    """Return the shapes that the stored tensor of a grid of scales may have."""
    rows, inputs = grid
    return [grid, *([(rows,)] if inputs == 1 else []), *([()] if grid == (1, 1) else [])]


def _scaled(
    module: Module,
    weights: Weights,
    numbers: Numbers,
    shape: Shape,
    scales: Scales,
    zeros: Numbers | None = None,
    read: tuple[str, ...] = (),
) -> Scaled:
    groups = group_index(module, ".weight_g_idx", shape[1], scales)
    # Older versions of compressed-tensors store zero points for symmetric schemes too.
    for points in module.present(".weight_zero_point") if zeros is None else ():
        zero = ((1 << numbers.bits - 1) * 0x11 & 0xFF) if points.dtype == "I32" else 0
        if not _only(points, (zero,)):
            module.refuse(points, "the scheme is symmetric, but these zero points are not 0")
    kind = {"e4m3": "fp8", "e2m1": "nvfp4"}.get(numbers.type, f"int{numbers.bits}")
    return Scaled(
        label=label(kind, scales, zeros, groups),
        shape=shape,
        numbers=numbers,
        scales=scales,
        zeros=zeros,
        groups=groups,
        unused=module.present(
            *ACTIVATIONS,
            *read,
            *(() if zeros else (".weight_zero_point",)),
            *(() if groups else (".weight_g_idx",)),
        ),
    )


def _only(stored: StoredTensor, allowed: Iterable[int]) -> bool:
    """Return whether each byte of a tensor is in `allowed`. A set of the bytes would take ten times as long to make."""
    return not bytes(stored.content()).translate(None, bytes(allowed))


def group_index(module: Module, suffix: str, inputs: int, scales: Scales) -> StoredTensor | None:
    """Return the stored tensor with the group of each input; None if groups consist of consecutive inputs.

    Raises CheckpointError if a group is out of range.
    """
    if (stored := module.find(suffix, ("I32",), (inputs,))) is None:
        return None
    found, groups, size = stored.content().cast("i"), scales.grid[1], scales.block[1]
    if not all(0 <= group < groups for group in set(found)):
        module.refuse(stored, f"expected numbers of {groups} groups, found {min(found)} to {max(found)}")
    return None if all(group == at // size for at, group in enumerate(found)) else stored


def label(kind: str, scales: Scales, zeros: Numbers | None, groups: StoredTensor | None) -> str:
    """Return a description of a matrix's encoding for operators, such as "int4, groups of 128"."""
    rows, inputs = scales.block
    if scales.grid == (1, 1):
        shared = "one scale"
    elif rows > 1:
        shared = f"blocks of {rows} x {inputs}"
    else:
        shared = f"groups of {inputs}" if scales.grid[1] > 1 else "a scale for each row"
    return ", ".join([kind, shared, *(["zero points"] if zeros else []), *(["reordered"] if groups else [])])
