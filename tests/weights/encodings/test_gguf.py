"""Every type of GGUF's blocks against the gguf package's dequantization, to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from infd.gguf.file import KINDS
from infd.kernels.cpu.linear import Panels
from infd.kernels.cpu.packed import Packed
from infd.kernels.families.matrices import Grouped
from infd.untrusted import WeightsFile
from infd.weights.encodings.gguf import GROUPS, Blocks
from infd.weights.encodings.integers import why_not
from infd.weights.encodings.rows import rows_of
from infd.weights.formats.encoded import EncodedReader
from infd.weights.stored import ROWS, EncodedTensor, StoredTensor
from tests.gguf.writing import TYPES, interleaved, quantized, random_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from infd.kernels.cpu.library import Library

SHAPE = (150, 512)  # three chunks of rows, the last one smaller; two or more blocks a row


def blocks(path: Path, kind: TYPES, content: np.ndarray, shape: tuple[int, ...] = SHAPE, **transforms) -> Blocks:
    """Store blocks after some other bytes, and return their encoding."""
    path.write_bytes(b"other" + content.tobytes())
    known = KINDS[int(kind)]
    stored = StoredTensor("some.weight", known.name, shape, 5, content.nbytes, WeightsFile(path))
    return Blocks(stored, known.elements, known.bytes, **transforms)


def decoded(encoding: Blocks) -> torch.Tensor:
    rows = rows_of(encoding)
    return torch.cat([rows(first, min(ROWS, 150 - first)) for first in range(0, 150, ROWS)])


def same_bits(ours: torch.Tensor, theirs: np.ndarray) -> bool:
    return ours.view(torch.int32).equal(torch.from_numpy(theirs.astype(np.float32)).view(torch.int32))


@pytest.mark.parametrize("number", sorted(KINDS))
def test_a_type_has_the_size_that_the_package_states(number: int):
    kind = KINDS[number]
    assert (kind.name, (kind.elements, kind.bytes)) == (TYPES(number).name, gguf.GGML_QUANT_SIZES[TYPES(number)])


@pytest.mark.parametrize("kind", [TYPES(number) for number in sorted(KINDS)], ids=lambda kind: kind.name)
def test_rows_equal_the_packages(kind: TYPES, tmp_path: Path):
    normal = np.random.default_rng(7).normal(0, 1, SHAPE).astype(np.float32)
    content = normal.astype(np.float64) if kind == TYPES.F64 else quantized(normal, kind)[0]
    theirs = content if kind == TYPES.F64 else gguf.dequantize(content, kind)
    encoding = blocks(tmp_path / "normal", kind, content)
    assert same_bits(decoded(encoding), theirs)
    encoding.stored.file.close()


@pytest.mark.parametrize(
    "kind",
    [TYPES(number) for number, kind in sorted(KINDS.items()) if kind.elements > 1],
    ids=lambda kind: kind.name,
)
def test_rows_of_random_bytes_equal_the_packages(kind: TYPES, tmp_path: Path):
    """Random bytes contain all numbers of few bits and all small scales; writers use only some of them."""
    content = random_blocks(kind, SHAPE, seed=3, size=3)
    encoding = blocks(tmp_path / "random", kind, content)
    with np.errstate(over="ignore"):  # MXFP4's largest exponents
        theirs = gguf.dequantize(content, kind)
    assert same_bits(decoded(encoding), theirs)
    encoding.stored.file.close()


def test_heads_are_put_into_order_whatever_rows_are_read(tmp_path: Path):
    ordered = np.random.default_rng(1).normal(0, 1, (150, 512)).astype(np.float32)
    encoding = blocks(tmp_path / "heads", TYPES.F32, interleaved(ordered, heads=15), head=10)
    assert same_bits(decoded(encoding), ordered)
    encoding.stored.file.close()


def test_a_bias_is_put_into_order_and_a_norm_loses_its_offset(tmp_path: Path):
    bias = np.random.default_rng(1).normal(0, 1, 150).astype(np.float32)
    ordered = blocks(tmp_path / "bias", TYPES.F32, interleaved(bias, heads=15), (150,), head=10)
    norm = blocks(tmp_path / "norm", TYPES.F32, bias + 1, (150,), offset=1.0)
    assert same_bits(rows_of(ordered)(0, 1)[0], bias)
    assert same_bits(rows_of(norm)(0, 1)[0], (bias + np.float32(1)) - np.float32(1))
    ordered.stored.file.close()
    norm.stored.file.close()


@pytest.mark.parametrize("heads", [0, 10])
@pytest.mark.parametrize("name", GROUPS)
def test_a_form_keeps_blocks_to_the_bit(library: Library, name: str, heads: int, tmp_path: Path):
    kind = TYPES[name]
    encoding = blocks(tmp_path / "kept", kind, random_blocks(kind, SHAPE, seed=5, size=3), head=heads)
    encoded, groups = EncodedTensor("some.weight", encoding), encoding.packed()
    assert not isinstance(groups, str)
    form = Packed(library).form(*SHAPE, torch.float32, groups)
    assert isinstance(form, Grouped)
    assert isinstance(form, Panels)
    assert why_not(encoded, form.groups) == ""
    storage = torch.empty(form.shape, dtype=form.dtype)
    for first, rows in EncodedReader(lambda _: None).integers(encoded, form.groups):
        form.place_groups(storage, first, rows)
    found, want = form.look_up(torch.arange(SHAPE[0]), storage), decoded(encoding)
    assert found.view(torch.int32).equal(want.view(torch.int32))
    encoding.stored.file.close()


def test_native_code_reads_whole_heads_and_subtracts_no_offset(tmp_path: Path):
    stack = blocks(tmp_path / "stack", TYPES.Q8_0, np.zeros((2, 4, 68), np.uint8), (2, 4, 64))
    found = stack.rows(5, 2)
    assert found is not None
    assert (found.head, found.tensor.shape) == (0, (2, 64))
    assert (found.tensor.offset, found.tensor.bytes) == (5 + 5 * 68, 2 * 68)

    heads = replace(stack, head=2)
    assert [rows and rows.head for rows in (heads.rows(2, 4), heads.rows(1, 2), heads.rows(2, 3))] == [2, None, None]
    assert replace(stack, offset=1.0).rows(0, 8) is None
    stack.stored.file.close()


def test_matrices_that_are_not_quantized_are_decoded_and_stacks_of_quantized_ones_kept(tmp_path: Path):
    half = blocks(tmp_path / "half", TYPES.F16, np.zeros((4, 64), np.float16), (4, 64), head=2)
    stack = blocks(tmp_path / "stack", TYPES.Q8_0, np.zeros((2, 4, 68), np.uint8), (2, 4, 64))
    assert half.packed() == "its numbers are F16"
    assert stack.packed() == GROUPS["Q8_0"]
    half.stored.file.close()
    stack.stored.file.close()
