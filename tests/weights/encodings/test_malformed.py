"""Encoded checkpoints with one fault each are refused before any weight is read, with file, tensor and reason."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from infd.errors import CheckpointError
from infd.kernels.select import select
from infd.models import registry
from infd.weights.checkpoint import BITS, Checkpoint
from infd.weights.encodings.find import read_format
from infd.weights.load import check
from infd.weights.stored import EncodedTensor
from tests.kernels.paging import CPU
from tests.weights.encodings.fixtures import MANY_EXHAUSTIVE, NAMES, WRITTEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from infd.models.base import Model

MODULE = "model.layers.0.mlp.down_proj"
GROUPED = ["awq-g32", "ct-w4a16-asym-g32", "ct-w4a16-g128", "ct-w8a16", "gptq-desc-act", "gptq-g128", "gptq-int8"]
MEMORY = 2**20  # bytes that a refusal may take besides the file's size


class Raw(NamedTuple):
    """A tensor as a header describes it, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


Tensors = dict[str, Raw]


def read(name: str) -> Tensors:
    whole = (WRITTEN / name / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    header.pop("__metadata__", None)
    first = 8 + length
    return {
        key: Raw(each["dtype"], tuple(each["shape"]), whole[first + begin : first + end])
        for key, each in header.items()
        for begin, end in (each["data_offsets"],)
    }


def write(directory: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    header, offset = {}, 0
    for key, each in tensors.items():
        end = offset + len(each.content)
        header[key] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    content = b"".join(each.content for each in tensors.values())
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def variants(name: str, tensors: Tensors, parts: list[str]) -> Iterator[tuple[str, Tensors]]:
    """Yield (what is wrong, the tensors): each part of a matrix missing, of other shapes, and of other dtypes."""
    for part in parts:
        dtype, shape, content = tensors[part]
        if not part.endswith("pre_quant_scale"):  # optional
            yield f"{part} missing", {key: each for key, each in tensors.items() if key != part}
        size = BITS[dtype] // 8
        for wrong in _shapes(shape):
            count = torch.Size(wrong).numel() * size
            resized = (content * (count // max(len(content), 1) + 1))[:count]
            yield f"{part} {list(wrong)}", {**tensors, part: Raw(dtype, wrong, resized)}
        for other in ("F64", "I64", "BOOL", "F8_E5M2", "U16"):
            if other == dtype or (other == "F8_E5M2" and name.startswith("fp8")):  # the format allows e5m2
                continue
            count = torch.Size(shape).numel() * (BITS[other] // 8)
            resized = (content * (count // max(len(content), 1) + 1))[:count]
            yield f"{part} {other}", {**tensors, part: Raw(other, shape, resized)}
    matrix = f"{MODULE}.weight"
    if matrix not in tensors:
        yield f"{matrix} twice", {**tensors, matrix: Raw("BF16", (160, 224), bytes(160 * 224 * 2))}


def _shapes(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield (2,)
        yield (0,)
        return
    for axis, size in enumerate(shape):
        yield (*shape[:axis], size + 1, *shape[axis + 1 :])
        yield (*shape[:axis], size + 8, *shape[axis + 1 :])
        yield (*shape[:axis], 0, *shape[axis + 1 :])
        if size > 1:
            yield (*shape[:axis], size - 1, *shape[axis + 1 :])
    yield (*shape, 2)
    if len(shape) == 2 and shape[0] != shape[1] and 1 not in shape:
        yield shape[::-1]


def model_of(name: str) -> Model:
    with Checkpoint(WRITTEN / name) as checkpoint:
        config = checkpoint.config
        return registry.build(
            config, select(CPU, torch.float32), dtype=torch.float32, device=CPU, max_len=64, stored=checkpoint.tensors
        )


def parts_of(name: str) -> list[str]:
    with Checkpoint(WRITTEN / name) as checkpoint:
        encoded = checkpoint.tensors[f"{MODULE}.weight"]
        assert isinstance(encoded, EncodedTensor)
        return [part.name for part in encoded.encoding.parts]


def refused(directory: Path, model: Model) -> str:
    """Return why a checkpoint is refused; "" if it is not."""
    try:
        with Checkpoint(directory) as checkpoint:
            check(model, checkpoint)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MANY_EXHAUSTIVE)
def test_a_part_that_is_missing_or_of_another_shape_or_dtype_is_named(name: str, tmp_path: Path) -> None:
    tensors, model = read(name), model_of(name)
    config = json.loads((WRITTEN / name / "config.json").read_text())
    assert not refused(write(tmp_path, tensors, config), model)
    count = 0
    for wrong, changed in variants(name, tensors, parts_of(name)):
        told = refused(write(tmp_path, changed, config), model)
        assert MODULE in told, f"{wrong}: {told or 'not refused'}"
        assert "model.safetensors" in told, f"{wrong}: {told}"
        count += 1
    assert count >= 20


@pytest.mark.parametrize("name", ["bnb-nf4", "ct-w4a16-asym-g32", "gptq-desc-act"])
def test_a_refusal_takes_no_more_memory_than_the_file(name: str, tmp_path: Path) -> None:
    tensors, model = read(name), model_of(name)
    config = json.loads((WRITTEN / name / "config.json").read_text())
    tracemalloc.start()
    try:
        for wrong, changed in variants(name, tensors, parts_of(name)):
            write(tmp_path, changed, config)
            size = (tmp_path / "model.safetensors").stat().st_size
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            assert refused(tmp_path, model)
            assert tracemalloc.get_traced_memory()[1] - before < size + MEMORY, wrong
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("change", [{"group_size": 48}, {"group_size": 2**24}, {"num_bits": 2, "bits": 2}])
def test_a_config_that_states_other_groups_or_bits_does_not_fit(
    name: str, change: dict[str, int], tmp_path: Path
) -> None:
    config = json.loads((WRITTEN / name / "config.json").read_text())
    table = config["quantization_config"]
    groups = [group["weights"] for group in table.get("config_groups", {}).values()] or [table]
    for group in groups:
        group.update({key: value for key, value in change.items() if group.get(key) is not None})
    model = model_of(name)
    told = refused(write(tmp_path, read(name), config), model)
    assert "model.safetensors: model.layers.0" in told or "quantization_config.bits" in told


CONTENTS: list[tuple[str, str, bytes, str]] = [
    ("ct-w4a16-g32", "weight_shape", struct.pack("<qq", 2**60, 2**60), r"it says \[1152921504606846976, "),
    ("ct-w4a16-g32", "weight_shape", struct.pack("<qq", 160, -8), r"it says \[160, -8\]"),
    ("gptq-desc-act", "g_idx", struct.pack("<224i", *([7] * 224)), "expected numbers of 7 groups, found 7 to 7"),
    ("gptq-desc-act", "g_idx", struct.pack("<224i", *([-1] * 224)), "expected numbers of 7 groups, found -1 to -1"),
    ("bnb-int8", "weight_format", b"\1", "expected 0, rows, found 1"),
]


@pytest.mark.parametrize(("name", "part", "content", "says"), CONTENTS)
def test_contents_that_contradict_the_other_parts_are_refused(
    name: str, part: str, content: bytes, says: str, tmp_path: Path
) -> None:
    tensors = read(name)
    key = f"{MODULE}.{part}"
    tensors[key] = tensors[key]._replace(content=content)
    config = json.loads((WRITTEN / name / "config.json").read_text())
    with pytest.raises(CheckpointError, match=rf": model\.safetensors: {key}: {says}"):
        Checkpoint(write(tmp_path, tensors, config)).close()


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [160, 224]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        "\xff",
        json.dumps({**STATE, "quant_type": "nf5"}),
        json.dumps({**STATE, "blocksize": 0}),
        json.dumps({**STATE, "blocksize": 32}),
        json.dumps({**STATE, "shape": [160, 2**40]}),
        json.dumps({**STATE, "shape": [160, 225]}),
        json.dumps({**STATE, "shape": [224 * 160]}),
        json.dumps({**STATE, "nested_blocksize": 256}),
        json.dumps({**STATE, "shape": [224, 160]}),
    ],
)
def test_a_state_of_bitsandbytes_that_is_not_one_is_refused(text: str, tmp_path: Path) -> None:
    tensors, content = read("bnb-nf4-single"), text.encode("latin1")
    key = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    tensors[key] = Raw("U8", (len(content),), content)
    config = json.loads((WRITTEN / "bnb-nf4-single" / "config.json").read_text())
    assert MODULE in refused(write(tmp_path, tensors, config), model_of("bnb-nf4-single"))


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_other_types_is_refused_by_key(name: str) -> None:
    """Each value of quantization_config in turn becomes a value of every other kind: refused by name, or read."""
    config = json.loads((WRITTEN / name / "config.json").read_text())["quantization_config"]
    for key in config:
        for value in (None, 0, -1, 1.5, "x", [], ["x"], {}, {"x": 1}, True, 2**70, [[]]):
            told = _refusal({**config, key: value})
            assert not told or told.startswith("config.json: quantization_config: ")


def _refusal(table: dict[str, Any]) -> str:
    try:
        read_format({"quantization_config": table})
    except CheckpointError as error:
        return str(error)
    return ""
