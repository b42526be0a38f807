"""Numbers are written as numpy and torch convert them."""

from __future__ import annotations

import base64
import json
import random
import struct
from typing import Any

import numpy as np
import pytest
import torch

from infd.http.formats.numbers import Encoding
from infd.request import Pooled

TYPES: dict[Any, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
DRAW = random.Random(1)
EDGES = [0.0, -0.0, 448.0, 449.0, 464.0, 465.0, 57344.0, 61439.0, 61440.0, 65504.0, 65519.0, 65520.0, 1e9, -1e9]
TIES = [sign * odd * 2.0**power for sign in (1, -1) for odd in range(1, 40, 2) for power in range(-30, 12)]
TIES += [odd * 2.0**power for odd in range(257, 513, 2) for power in range(-3, 3)]  # of bfloat16
DRAWN = [DRAW.gauss(0, 10.0**size) for size in range(-9, 6) for _ in range(100)]
VALUES = np.array([*EDGES, *TIES, *DRAWN], dtype="<f4")


def whole(encoding: Encoding, pooled: Pooled, *, by_token: bool = False) -> bytes:
    return b"".join(encoding.json(pooled, by_token=by_token))


@pytest.mark.parametrize("dtype", TYPES)
def test_base64_of_smaller_types_is_torchs(dtype: Any):
    written = json.loads(whole(Encoding(True, dtype), Pooled(1, VALUES.tobytes())))

    expected = torch.from_numpy(VALUES.copy()).to(TYPES[dtype]).view(torch.uint8).numpy().tobytes()
    assert base64.b64decode(written) == expected


def test_big_endian_numbers_are_reversed():
    for dtype, form in (("float32", ">f4"), ("float16", ">f2")):
        written = json.loads(whole(Encoding(True, dtype, "big"), Pooled(1, VALUES[-900:-800].tobytes()), by_token=True))
        assert base64.b64decode(written) == VALUES[-900:-800].astype(form).tobytes()


def test_json_reads_back_the_same_float32():
    drawn = VALUES[-96:]
    pooled = Pooled(8, drawn.tobytes())

    row = json.loads(whole(Encoding(), pooled))
    rows = json.loads(whole(Encoding(), pooled, by_token=True))

    assert struct.pack("<96f", *row) == drawn.tobytes()
    assert np.array_equal(np.array(rows, dtype="<f4"), drawn.reshape(12, 8))


@pytest.mark.parametrize(
    "encoding", [Encoding(), Encoding(True), Encoding(True, "fp8_e4m3"), Encoding(True, "float16")]
)
def test_no_piece_holds_more_than_a_few_thousand_numbers(encoding: Encoding):
    """The event loop encodes the numbers of a long input piece by piece, and serves other clients between."""
    pieces = list(encoding.json(Pooled(1000, bytes(4 * 1000 * 20)), by_token=True))

    assert len(pieces) > 6
    assert max(map(len, pieces)) < 20_000
