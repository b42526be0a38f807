"""Read GGUF's blocks: their integers and scales unchanged, or decoded to float32.

A function for each type takes whole blocks, uint8 [N, bytes], and returns their integers and scales as `GroupedRows`
of N rows; GROUPS in gguf.py lists them by type. A block's scales are float16, two bytes; that of MXFP4 is
an exponent, one byte. Decoded numbers are bit-identical to those of GGUF's reference implementation: products of a
block's integers and scales are exact in float32, except in Q6_K and IQ4_XS, where both round once.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from infd.groups import GroupedRows
from infd.rounding import ceil_div
from infd.weights.encodings.gguf import GROUPS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from infd.weights.encodings.gguf import Blocks

# By name of a table in `Groups`. That of fp4 contains its numbers doubled.
TABLES: Final = MappingProxyType(
    {
        "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
        "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    }
)


def block_rows(encoding: Blocks) -> Callable[[int, int], Tensor]:
    """See `rows_of` in rows.py. The returned function reads its rows from the file in each call."""
    kind, inputs, read = encoding.stored.dtype, encoding.shape[-1], _bytes_of(encoding)

    def rows(first: int, count: int) -> Tensor:
        blocks = read(first, count).view(-1, encoding.block_bytes)
        found = blocks.view(PLAIN[kind]).float() if kind in PLAIN else _decoded(kind, blocks)
        found = found.view(count, inputs)
        return found - encoding.offset if encoding.offset else found

    def flat(first: int, count: int) -> Tensor:
        """Return the only row of a vector, whose elements are ordered like a matrix's rows."""
        return rows(0, 1).view(-1, encoding.head // 2, 2).transpose(1, 2).reshape(1, -1)

    return flat if encoding.head and len(encoding.shape) == 1 else rows


def block_groups(encoding: Blocks, inputs: int) -> Callable[[int, int], GroupedRows]:
    """See `integers_of` in integers.py. The returned function reads its rows from the file in each call."""
    kind, width, read = encoding.stored.dtype, encoding.shape[-1], _bytes_of(encoding)
    each, groups = max(1, GROUPS[kind].inputs // inputs), ceil_div(width, inputs)

    def rows(first: int, count: int) -> GroupedRows:
        found = READERS[kind](read(first, count).view(-1, encoding.block_bytes))

        def spread(numbers: Tensor | None) -> Tensor | None:
            if numbers is None:
                return None
            return numbers.reshape(count, -1).repeat_interleave(each, 1)[:, :groups]

        scales = spread(found.scales)
        assert scales is not None
        shared = None if found.shared is None else found.shared.reshape(count, -1)
        return GroupedRows(found.integers.view(count, width), scales, minima=spread(found.minima), shared=shared)

    return rows


def _bytes_of(encoding: Blocks) -> Callable[[int, int], Tensor]:
    """Return a function of (first, count) that reads rows of a matrix, in its order: uint8 [count, bytes of a row]."""
    stored, head = encoding.stored, encoding.head if len(encoding.shape) > 1 else 0
    width = stored.shape[-1] // encoding.elements * encoding.block_bytes

    def read(first: int, count: int) -> Tensor:
        content = torch.empty(count * width, dtype=torch.uint8)
        stored.read(content.numpy().data, first * width)
        return content.view(count, width)

    def heads(first: int, count: int) -> Tensor:
        begin, end = first // head * head, -(-(first + count) // head) * head
        # Stored rows 2i and 2i + 1 of a head are its rows i and i + head / 2.
        ordered = read(begin, end - begin).view(-1, head // 2, 2, width).transpose(1, 2).reshape(-1, width)
        return ordered[first - begin : first - begin + count]

    return heads if head else read


def _decoded(kind: str, blocks: Tensor) -> Tensor:
    groups, rows = GROUPS[kind], READERS[kind](blocks)
    scales, minima, integers = rows.scales.float(), rows.minima, rows.integers
    if minima is not None:
        minima = minima.float()
    if rows.shared is not None:
        scales *= rows.shared[:, :1].float()
        if minima is not None:
            minima *= rows.shared[:, 1:].float()
    numbers = torch.tensor(TABLES[groups.table])[integers.int() + 8] if groups.table else integers
    found = numbers.float().view(len(blocks), scales.shape[1], -1) * scales.unsqueeze(-1)
    if minima is not None:
        found += minima.unsqueeze(-1)
    return found.view(len(blocks), -1)


def _halves(two_bytes: Tensor) -> Tensor:
    """Return [N, 2 * k] uint8 as float16 numbers [N, k]."""
    return two_bytes.contiguous().view(torch.float16)


def _fields(content: Tensor, bits: int, group: int) -> Tensor:
    """Unpack fields of `bits` bits: for each `group` of bytes, first the lowest field of every byte, then the next."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(-1, 1)
    fields = content.reshape(len(content), -1, 1, group) >> shifts & ((1 << bits) - 1)
    return fields.reshape(len(content), -1)


def _nibbles(content: Tensor, less: int = 8) -> Tensor:
    """Return fields of four bits, minus `less`, as int8; the lower halves of each 16 bytes come first."""
    return _fields(content, 4, 16).view(torch.int8) - less


def _q4_0(blocks: Tensor) -> GroupedRows:
    return GroupedRows(_nibbles(blocks[:, 2:]), _halves(blocks[:, :2]))


def _q4_1(blocks: Tensor) -> GroupedRows:
    return GroupedRows(_nibbles(blocks[:, 4:], 0), _halves(blocks[:, :2]), minima=_halves(blocks[:, 2:4]))


def _with_fifth_bits(content: Tensor) -> Tensor:
    """Return 32 numbers of 5 bits: four bytes contain the highest bits, the next 16 bytes the others."""
    fifth = content[:, :4].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (_fields(content[:, 4:], 4, 16) | fifth.reshape(-1, 32) << 4).view(torch.int8)


def _q5_0(blocks: Tensor) -> GroupedRows:
    return GroupedRows(_with_fifth_bits(blocks[:, 2:]) - 16, _halves(blocks[:, :2]))


def _q5_1(blocks: Tensor) -> GroupedRows:
    return GroupedRows(_with_fifth_bits(blocks[:, 4:]), _halves(blocks[:, :2]), minima=_halves(blocks[:, 2:4]))


def _q8_0(blocks: Tensor) -> GroupedRows:
    return GroupedRows(blocks[:, 2:].contiguous().view(torch.int8), _halves(blocks[:, :2]))


def _with_minima(integers: Tensor, scales: Tensor, minima: Tensor, shared: Tensor) -> GroupedRows:
    """Return numbers from which minima are subtracted. shared: [N, 4] uint8, the factors of scales and of minima."""
    factors = _halves(shared) * torch.tensor([1, -1], dtype=torch.float16)
    return GroupedRows(
        integers.view(torch.int8), scales.view(torch.int8), minima=minima.view(torch.int8), shared=factors
    )


def _q2_k(blocks: Tensor) -> GroupedRows:
    return _with_minima(_fields(blocks[:, 16:80], 2, 32), blocks[:, :16] & 15, blocks[:, :16] >> 4, blocks[:, 80:])


def _q3_k(blocks: Tensor) -> GroupedRows:
    high, low, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    scales = _fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << 4
    integers = _fields(low, 2, 32) | _fields(high, 1, 32) << 2
    return GroupedRows(integers.view(torch.int8) - 4, scales.view(torch.int8) - 32, shared=_halves(blocks[:, 108:]))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eight scales and eight minima of Q4_K and Q5_K."""
    packed = blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1)
    return scales, torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1)


def _q4_k(blocks: Tensor) -> GroupedRows:
    return _with_minima(_fields(blocks[:, 16:], 4, 32), *_k_scales(blocks), blocks[:, :4])


def _q5_k(blocks: Tensor) -> GroupedRows:
    integers = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return _with_minima(integers, *_k_scales(blocks), blocks[:, :4])


def _q6_k(blocks: Tensor) -> GroupedRows:
    integers = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return GroupedRows(integers.view(torch.int8) - 32, scales, shared=_halves(blocks[:, 208:]))


def _iq4_xs(blocks: Tensor) -> GroupedRows:
    low = blocks[:, 4:8].unsqueeze(-1) >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    high = blocks[:, 2:4].unsqueeze(-1) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    scales = (low.reshape(-1, 8) | high.reshape(-1, 8) << 4).view(torch.int8) - 32
    return GroupedRows(_nibbles(blocks[:, 8:]), scales, shared=_halves(blocks[:, :2]))


def _mxfp4(blocks: Tensor) -> GroupedRows:
    # The table contains fp4's numbers doubled, so 1 is subtracted from the exponent, whose bias is 127.
    return GroupedRows(_nibbles(blocks[:, 1:]), torch.exp2(blocks[:, :1].double() - 128).float())


# By GGUF type
PLAIN: Final = MappingProxyType(
    {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)
READERS: Final[Mapping[str, Callable[[Tensor], GroupedRows]]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _q4_0,  # indices of a table in place of integers
        "IQ4_XS": _iq4_xs,
        "MXFP4": _mxfp4,
    }
)
