"""Choose the cache's number of pages, and the longest sequence that fits the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import Struct

from infd.errors import OutOfMemory

if TYPE_CHECKING:
    from infd.runner.arenas.cache import CacheSpec
    from infd.scheduler.layout import CacheLayout


class Room(NamedTuple):
    """The bytes available to the cache, and their derivation in words, for logs."""

    bytes: int
    why: str


class CacheSize(Struct, frozen=True):
    """The size of the cache.

    pages          number of pages, with ids 1..pages; page 0, for padding, is not counted
    bytes          bytes of the cache's arena, page 0 and alignment included
    max_model_len  tokens of the longest sequence that fits the pages
    reason         derivation of `pages` in words, for logs
    """

    pages: int
    bytes: int
    max_model_len: int
    reason: str


def size_cache(
    spec: CacheSpec,
    *,
    configured: int | None,
    room: Room,
    rows: int,
    max_model_len: int,
    step_tokens: int,
) -> CacheSize:
    """Choose the number of pages, and the longest sequence that fits the pages.

    configured   bytes that the settings state; None: `room`, but no more than `rows` sequences of max_model_len need
    step_tokens  token budget of a step; a group with a window needs pages for its window and for a step's tokens

    Raises OutOfMemory if a prompt of one token and an answer of one token do not fit.
    """
    layout = spec.layout
    if not layout.groups:
        longest = max_model_len if layout.divisible else min(max_model_len, step_tokens)
        return CacheSize(0, 0, longest, "the model has no cache")
    budget, reason = room if configured is None else (configured, "as configured")
    pages = (budget - spec.alignment_bytes) // spec.page_bytes - 1
    useful = rows * layout.peak_pages(max_model_len, step_tokens)
    if configured is None and pages > useful:
        pages, reason = useful, f"{rows} sequences of {max_model_len:,} tokens"
    longest = _longest(layout, max(pages, 0), max_model_len, step_tokens)
    if longest < 2:
        raise OutOfMemory(
            f"the cache has room for {max(pages, 0)} pages of {spec.page_bytes:,} bytes ({reason}); raise cache.bytes"
        )
    return CacheSize(pages, spec.arena_bytes(pages), longest, reason)


def _longest(layout: CacheLayout, pages: int, most: int, step_tokens: int) -> int:
    """Return the tokens of the longest sequence that fits `pages`, at most `most`."""
    fits, too_long = 0, most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if layout.peak_pages(middle, step_tokens) <= pages:
            fits = middle
        else:
            too_long = middle
    return fits
