"""Encode texts and pairs of texts for models that reduce a prompt to numbers, and cut those that are too long.

Special tokens are never cut: a text is cut first, then the tokenizer's post-processor adds them. The ids are those of
transformers with `truncation=True` (longest_first for pairs) and `truncation_side`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    import tokenizers

Side = Literal["left", "right"]


class Passage(Struct, frozen=True):
    """A text, or a pair of texts. most: most tokens of each text, without special tokens; None: all; empty: all."""

    texts: tuple[str, ...]
    most: tuple[int | None, ...] = ()


class Cut(Struct, frozen=True):
    """How much of a passage is kept.

    most  most tokens, special tokens included; None: all
    side  the end at which tokens are removed
    """

    most: int | None = None
    side: Side = "right"


WHOLE: Final = Cut()


class Encoded(Struct, frozen=True):
    """The ids of a passage. second: position of the first token whose token type is not 0; None: all have type 0."""

    ids: list[int]
    second: int | None = None


def encode(
    backend: tokenizers.Tokenizer, passages: Sequence[Passage], cut: Cut, *, add_special_tokens: bool
) -> list[Encoded]:
    """Return the ids of each passage. Raises what the library raises."""
    return [_encode(backend, passage, cut, special=add_special_tokens) for passage in passages]


def _encode(backend: tokenizers.Tokenizer, passage: Passage, cut: Cut, *, special: bool) -> Encoded:
    texts = passage.texts
    if not any(passage.most):
        # Unlike `encode`, `encode_batch_fast` releases the GIL.
        whole = backend.encode_batch_fast([texts if len(texts) == 2 else texts[0]], add_special_tokens=special)[0]
        if cut.most is None or len(whole.ids) <= cut.most:
            return _encoded(whole)
    parts = [backend.encode(text, add_special_tokens=False) for text in texts]
    for part, most in zip(parts, passage.most, strict=False):
        if most is not None:
            part.truncate(most, direction=cut.side)
    if cut.most is not None:
        added = backend.num_special_tokens_to_add(len(parts) == 2) if special else 0
        room = max(0, cut.most - added)
        for part, most in zip(parts, _lengths([len(part.ids) for part in parts], room), strict=True):
            part.truncate(most, direction=cut.side)
    pair = parts[1] if len(parts) == 2 else None
    return _encoded(backend.post_process(parts[0], pair, add_special_tokens=special))


def _lengths(lengths: list[int], room: int) -> list[int]:
    """Return how many tokens of each text are kept, so that all fit into `room`: the longer text is cut first."""
    if sum(lengths) <= room:
        return lengths
    if len(lengths) == 1:
        return [room]
    shorter = min(lengths)
    if 2 * shorter > room:  # both are cut, to halves; the longer one's may be larger by one
        halves = [room // 2, room - room // 2]
        return halves if lengths[0] <= lengths[1] else halves[::-1]
    return [length if length == shorter else room - shorter for length in lengths]


def _encoded(encoding: tokenizers.Encoding) -> Encoded:
    types = encoding.type_ids
    return Encoded(encoding.ids, types.index(1) if 1 in types else None)
