"""Token sampling in C++, without sorting the vocabulary: draw.cpp, narrow.cpp and repeats.cpp of `native/`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from infd.kernels.cpu.library import INT, POINTER, Library
from infd.kernels.reference.drawing import noise, shaping
from infd.kernels.reference.drawing.narrowing import columns

if TYPE_CHECKING:
    from torch import Tensor

    from infd.kernels.families.draw import Drawing, History, Narrowing, Repeats


class Draw:
    """Implements families.draw.Draw. The reference implementation applies the other penalties."""

    penalize_repetition = staticmethod(shaping.penalize_repetition)
    penalize_answer = staticmethod(shaping.penalize_answer)

    def __init__(self, library: Library | None = None) -> None:
        library = library or Library()
        self._draw = library.kernel("draw", POINTER, INT, INT, POINTER, INT, *(POINTER,) * 8)
        self._narrow = library.kernel("narrow", POINTER, INT, INT, POINTER, INT, POINTER, POINTER, POINTER)
        self._penalize_repeats = library.kernel(
            "penalize_repeats", POINTER, INT, INT, POINTER, INT, POINTER, INT, *(POINTER,) * 8, INT, INT
        )
        self._largest = library.kernel("largest", POINTER, INT, INT, INT, POINTER, POINTER)
        self._forbid = library.kernel("forbid", POINTER, INT, INT, POINTER, INT, POINTER, INT)
        self._hashed = torch.empty(0, dtype=torch.int32)  # hashes of all token ids, for the last call's vocabulary

    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        if logits.dtype is not torch.float32:
            shaping.forbid(logits, rows, bits)
            return
        assert logits.stride(1) == 1
        rows, bits = rows.contiguous(), bits.contiguous()
        self._forbid(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            rows.data_ptr(),
            len(rows),
            bits.data_ptr(),
            bits.shape[1],
        )

    def penalize_repeats(self, logits: Tensor, rows: Tensor, history: History, repeats: Repeats) -> None:
        assert logits.dtype is torch.float32
        assert logits.stride(1) == 1
        rows = rows.contiguous()
        params = [each.contiguous() for each in (history.sequence, history.end, *repeats)]
        self._penalize_repeats(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            rows.data_ptr(),
            len(rows),
            history.tokens.data_ptr(),
            history.tokens.stride(0),
            *(each.data_ptr() for each in params),
            *repeats.tails.shape,
        )

    def narrow(self, logits: Tensor, narrowing: Narrowing) -> Tensor:
        assert logits.dtype is torch.float32
        assert logits.stride(1) == 1
        parameters, top_k = columns(narrowing), narrowing.top_k.contiguous()
        rows, temperatures = narrowing.rows.contiguous(), torch.empty(len(narrowing.rows))
        self._narrow(
            logits.data_ptr(),
            logits.stride(0),
            logits.shape[1],
            rows.data_ptr(),
            len(rows),
            parameters.data_ptr(),
            top_k.data_ptr(),
            temperatures.data_ptr(),
        )
        return temperatures

    def largest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits.float()
        assert logits.stride(1) == 1
        count, vocabulary = logits.shape
        values, tokens = torch.empty(count), torch.empty(count, dtype=torch.int64)
        self._largest(logits.data_ptr(), logits.stride(0), vocabulary, count, values.data_ptr(), tokens.data_ptr())
        return values, tokens

    def __call__(self, logits: Tensor, drawing: Drawing, *, truncated: bool) -> Tensor:
        if logits.dtype is not torch.float32:
            logits = logits[drawing.rows].float()
            drawing = drawing._replace(rows=torch.arange(len(logits)))
        assert logits.stride(1) == 1
        count, vocabulary = len(drawing.rows), logits.shape[1]
        if len(self._hashed) != vocabulary:
            self._hashed = noise.token_hash(torch.arange(vocabulary))
        limits = (drawing.top_k, drawing.top_p, drawing.min_p)
        if not truncated:
            limits = (drawing.top_k.new_zeros(count), drawing.top_p.new_ones(count), drawing.min_p.new_zeros(count))
        keys = noise.row_keys(drawing.seed[:, 0], drawing.seed[:, 1], drawing.position)
        params = [each.contiguous() for each in (drawing.largest, drawing.temperature, *limits, keys)]
        rows, tokens = drawing.rows.contiguous(), torch.empty(count, dtype=torch.int64)
        self._draw(
            logits.data_ptr(),
            logits.stride(0),
            vocabulary,
            rows.data_ptr(),
            count,
            *(each.data_ptr() for each in params),
            self._hashed.data_ptr(),
            tokens.data_ptr(),
        )
        return tokens
