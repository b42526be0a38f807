"""Sort the routes of a step by expert, into blocks of equal size: the rows of one program of a grouped product.

A route is one of the k experts of one token. All routes of a block have the same expert; the last block of an expert is
padded. The number of blocks depends on the numbers of tokens and experts alone, so a captured step has one launch shape
for all routes, and the host does not wait for the device. Blocks that the routes do not need have the expert -1.

Two launches: a program for each expert counts its routes; then each program finds its first block from all counts, and
writes its routes in ascending order. Sorting uses no atomics, so it is deterministic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

BLOCK: Final = 1024  # routes that a program reads at a time


class RouteBlocks(NamedTuple):
    """Routes in blocks.

    rows     routes of a block
    order    [blocks * rows] int32: the route of each row of a block, or the number of routes if the row is padding;
             undefined in blocks without an expert
    experts  [blocks] int32: the expert of each block; -1: none
    """

    rows: int
    order: Tensor
    experts: Tensor


@triton.jit(do_not_specialize=["routes"])
def count_routes(experts, counts, routes, BLOCK: tl.constexpr):
    """Store the number of routes of one expert. experts: [routes] int64."""
    expert = tl.program_id(0)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(0, routes, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found += (tl.load(experts + at, mask=at < routes, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["routes", "most"])
def place_routes(
    experts,
    counts,
    order,
    blocks,
    routes,
    most,
    EXPERTS: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the blocks of one expert; the last program writes the blocks without an expert.

    blocks  [most] int32
    EACH    EXPERTS, rounded up to a power of two
    """
    expert = tl.program_id(0)
    each = tl.arange(0, EACH)
    needed = (tl.load(counts + each, mask=each < EXPERTS, other=0) + ROWS - 1) // ROWS
    begin = tl.sum(tl.where(each < expert, needed, 0), 0)
    end = begin + tl.sum(tl.where(each == expert, needed, 0), 0)
    of_block = expert
    if expert == EXPERTS:
        end = most
        of_block = -1
    for first in range(begin, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(blocks + at, tl.zeros([BLOCK], tl.int32) + of_block, mask=at < end)
    if expert < EXPERTS:
        row = begin * ROWS
        for first in range(0, routes, BLOCK):
            at = first + tl.arange(0, BLOCK)
            own = tl.load(experts + at, mask=at < routes, other=-1) == expert
            tl.store(order + row + tl.cumsum(own.to(tl.int32), 0) - 1, at, mask=own)
            row += tl.sum(own.to(tl.int32), 0)
        padding = row + tl.arange(0, ROWS)
        tl.store(order + padding, tl.zeros([ROWS], tl.int32) + routes, mask=padding < end * ROWS)


def block_routes(experts: Tensor, count: int, rows: int) -> RouteBlocks:
    """Sort routes by expert.

    experts  [T, k] int64, each from 0 to count - 1
    rows     of a block, a power of two
    """
    experts = experts.contiguous()
    routes, device = experts.numel(), experts.device
    most = most_blocks(routes, count, rows)
    counts = torch.empty(count, dtype=torch.int32, device=device)
    order = torch.empty(most * rows, dtype=torch.int32, device=device)
    blocks = torch.empty(most, dtype=torch.int32, device=device)
    count_routes[count,](experts, counts, routes, BLOCK=BLOCK)
    place_routes[count + 1,](
        experts,
        counts,
        order,
        blocks,
        routes,
        most,
        EXPERTS=count,
        EACH=triton.next_power_of_2(count),
        ROWS=rows,
        BLOCK=BLOCK,
    )
    return RouteBlocks(rows, order, blocks)


def most_blocks(routes: int, experts: int, rows: int) -> int:
    """Return the largest number of blocks that `routes` routes need: each expert may leave one block unfilled."""
    used = min(routes, experts)
    return used + (routes - used) // rows
