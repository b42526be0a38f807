"""Products with compressed bfloat16 weights have the bits of products with plain ones."""

from __future__ import annotations

import threading

import pytest
import torch

from infd.kernels.cpu.linear import PANEL, Compressed, Matrices
from tests.kernels.cpu.placed import Placed, draw
from tests.native import kernels

SHAPES = [(64, 64), (1, 1), (63, 2), (65, 7), (200, 129), (64, 1023), (130, 2050), (66, 4399)]
ROWS = [*range(1, 41), 241]


@pytest.fixture(scope="module", params=["amx", "avx512_bf16"])
def library(request, built):
    return kernels(request.param)


def chance(shape, share):
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) < share


def random_bits(shape):
    numbers = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(5))
    return numbers.to(torch.int16).view(torch.bfloat16)


def with_last(weight, *numbers):
    weight = weight.clone()
    weight.view(-1)[-len(numbers) :] = torch.tensor(numbers[-weight.numel() :])
    return weight


CONTENTS = {
    "Gaussian": lambda shape: draw(*shape),
    "constant": lambda shape: torch.full(shape, -1.5).bfloat16(),
    "zero": lambda shape: torch.zeros(shape).bfloat16(),
    "sparse": lambda shape: draw(*shape) * chance(shape, 0.1),
    "subnormal": lambda shape: (draw(*shape, dtype=torch.float64) * 2.0**-130).bfloat16(),
    "largest": lambda shape: (draw(*shape).sign() * 3.3e38).bfloat16(),
    "an outlier": lambda shape: with_last(draw(*shape), 3e38),
    "not finite": lambda shape: with_last(draw(*shape), float("nan"), float("-inf"))[: shape[0]],
    "some tiny": lambda shape: torch.where(chance(shape, 0.012), draw(*shape) * 2.0**-60, draw(*shape)),
    "rows of several sizes": lambda shape: draw(*shape) * 2.0 ** (torch.arange(shape[0]) % 40).unsqueeze(1),
    "random bits": random_bits,
}


def bits(numbers):
    return numbers.view(torch.int32 if numbers.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_rows_have_the_bits_of_the_plain_form(library, content, shape):
    weight = CONTENTS[content](shape).bfloat16()
    plain, compressed = Placed(Matrices(library), weight), Placed(Compressed(library), weight)
    tokens = torch.arange(len(weight)).flip(0)
    assert bits(compressed.look_up(tokens)).equal(bits(weight[tokens]))
    for rows in ROWS:
        x = draw(rows, shape[1], seed=rows)
        assert bits(compressed.multiply(x, wide=True)).equal(bits(plain.multiply(x, wide=True))), f"{rows} rows"


def changed(placed):
    """Return which bytes placing has changed: of panels [n, panel_bytes], and of their rests [n, any]."""
    written, count = placed.kept.view(torch.uint8).view(-1) != 255, placed.form.shape[0]
    end = count * placed.form.panel_bytes
    return written[:end].view(count, -1), written[end:].view(count, -1)


def test_panels_follow_one_another_and_take_three_quarters_of_plain_ones(library):
    placed = Placed(Compressed(library), draw(200, 1024))
    panels, rests = changed(placed)
    assert panels[:, -64:].any(1).all()
    assert not rests.any()
    assert placed.form.panel_bytes < 0.76 * 128 * 1024


@pytest.mark.parametrize("inputs", [1024, 20])
def test_a_panel_that_would_not_gain_is_kept_plain(library, inputs):
    weight = draw(3 * PANEL, inputs)
    weight[PANEL : 2 * PANEL] = random_bits((PANEL, inputs))
    _, rests = changed(Placed(Compressed(library), weight))
    assert rests.any(1).tolist() == [False, True, False]
    assert rests[1].sum() > 0.9 * inputs * PANEL * 2 / 4


def test_rows_may_be_placed_again(library):
    weight, tokens = random_bits((200, 300)), torch.arange(200)
    placed = Placed(Compressed(library), draw(200, 300))
    for first, last in [(0, 64), (190, 200), (3, 70), (64, 128)]:
        placed.form.place(placed.kept, first, weight[first:last])
    expected = draw(200, 300)
    for first, last in [(0, 70), (64, 128), (190, 200)]:
        expected[first:last] = weight[first:last]
    assert bits(placed.look_up(tokens)).equal(bits(expected))


STEPS = 0x12B1F16A  # PanelHeader::STEPS


def test_memory_that_looks_like_a_panel_does_not_matter(library):
    weight = draw(64, 384)
    form = Compressed(library).form(*weight.shape, torch.bfloat16)
    kept = torch.full(form.shape, -1, dtype=torch.int16).view(form.dtype)
    kept.view(torch.int32)[0, 0] = STEPS  # its lists would be 16 GiB away
    form.place(kept, 0, weight[:10])
    form.place(kept, 10, weight[10:])
    assert form.look_up(torch.arange(64), kept).equal(weight)


def test_threads_place_parts_of_a_panel_at_once(library):
    weight = draw(64, 16384)  # a panel takes long enough to store that threads do meet
    placed = Placed(Compressed(library), torch.zeros_like(weight))

    def place(first):
        for row in range(first, 64, 4):
            placed.form.place(placed.kept, row, weight[row : row + 1])

    threads = [threading.Thread(target=place, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert placed.look_up(torch.arange(64)).equal(weight)
