"""Change the logits of rows that request it, before a token is chosen from them: the logits processors.

The stages are those of `sampling`, in its order, from the penalties to narrowing.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from infd.kernels.families.draw import History, Narrowing, Repeats
from infd.runner.row_sampling import Float, Integer, Stage
from infd.runner.sampled import Adapted
from infd.runner.sampling import bias, floor, mirostat, words
from infd.runner.sampling.breakers import BreakerTables

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.draw import Draw
    from infd.request import Breakers
    from infd.runner.rows import Rows
    from infd.runner.sampled import SampledPositions

    Array = npt.NDArray[Any]


class Shaping(NamedTuple):
    """The changes to the logits of N sampled positions.

    at       the sampled positions
    stages   [N] Stage flags
    allowed  [N, ceil(vocab / 32)] int32 bitmask; None: all tokens are allowed
    """

    at: SampledPositions
    stages: Array
    allowed: Array | None

    def select(self, subset: Array, index: Tensor) -> Shaping:
        """Select positions; for the arguments see SampledPositions.select."""
        allowed = None if self.allowed is None else self.allowed[subset]
        return Shaping(self.at.select(subset, index), self.stages[subset], allowed)


class Shaper:
    """Changes the logits of sequences in `rows`."""

    def __init__(self, rows: Rows, draw: Draw) -> None:
        self._rows = rows
        self._draw = draw
        self._breakers = BreakerTables(rows.vocab_size, rows.upload)

    def shape(self, logits: Tensor, shaping: Shaping) -> Tensor | None:
        """Apply the stages and the mask to logits [N, vocab] float32 in place.

        Returns [N] float32: what narrowing subtracted from the cooled logits of rows that report logits, 0 for other
        rows; None: no row reports logits.
        """
        at, stages, allowed = shaping
        for stage, change in _BEFORE_MASK:
            subset = np.flatnonzero(stages & stage)
            if subset.size:
                change(self, logits, at, subset)
        if allowed is not None:
            subset = np.flatnonzero(limited(allowed))
            if subset.size:
                self._draw.forbid(logits, self._rows.upload(subset), self._rows.upload(allowed[subset]))
        subset = np.flatnonzero(stages & Stage.NARROW)
        return self._narrow(logits, at, stages, subset) if subset.size else None

    def adapt(self, logits: Tensor, tokens: Tensor, shaping: Shaping, subset: Array) -> Adapted | None:
        """Update mirostat's state of the rows that have it; None: no row has.

        logits  [n, vocab] as `shape` left them
        tokens  [n] int64, chosen from them
        subset  [n] indices of these rows into the N positions of `shaping`
        """
        adaptive = np.flatnonzero(shaping.stages[subset] & Stage.MIROSTAT)
        if not adaptive.size:
            return None
        index = self._rows.upload(adaptive)
        rows = shaping.at.rows.index_select(0, self._rows.upload(subset[adaptive]))
        floats = self._rows.floats.index_select(0, rows)
        kept, sampled = (each.index_select(0, index) for each in (logits, tokens))
        mu = mirostat.adapt(kept, sampled, *(floats[:, column] for column in (Float.MU, Float.TAU, Float.ETA)))
        self._rows.floats[:, Float.MU].index_copy_(0, rows, mu)
        return Adapted(subset[adaptive].tolist(), mu)

    def _narrow(self, logits: Tensor, at: SampledPositions, stages: Array, subset: Array) -> Tensor | None:
        """Limit and cool the rows `subset` in place; return the numbers subtracted if a row reports logits."""
        index = self._rows.upload(subset)
        largest = (logits if subset.size == len(logits) else logits.index_select(0, index)).amax(-1)
        row, end = at.rows.index_select(0, index), at.ends.index_select(0, index)
        floats, integers = self._rows.floats.index_select(0, row), self._rows.integers.index_select(0, row)
        top_k, min_p = integers[:, Integer.TOP_K], floats[:, Float.MIN_P]
        adaptive = np.flatnonzero(stages[subset] & Stage.MIROSTAT)
        if adaptive.size:
            some = self._rows.upload(adaptive)
            settings = floats.index_select(0, some)
            cooled = logits.index_select(0, index.index_select(0, some))
            cooled.sub_(largest.index_select(0, some)[:, None]).div_(settings[:, Float.COOLING, None])
            found = mirostat.limits(cooled, settings[:, Float.MIROSTAT], settings[:, Float.MU])
            top_k, min_p = (whole.index_copy(0, some, part) for whole, part in zip((top_k, min_p), found, strict=True))
        narrowing = Narrowing(
            rows=index,
            largest=largest,
            seed=integers[:, Integer.SEED_LOW : Integer.SEED_HIGH + 1],
            position=end.to(torch.int32),
            temperature=floats[:, Float.COOLING],
            late=floats[:, Float.LATE] != 0,
            top_n_sigma=floats[:, Float.TOP_N_SIGMA],
            top_k=top_k,
            top_p=floats[:, Float.TOP_P],
            min_p=min_p,
            typical_p=floats[:, Float.TYPICAL_P],
            xtc_probability=floats[:, Float.XTC_PROBABILITY],
            xtc_threshold=floats[:, Float.XTC_THRESHOLD],
            range=floats[:, Float.RANGE],
            exponent=floats[:, Float.EXPONENT],
        )
        temperatures = self._draw.narrow(logits, narrowing)
        plain = stages[subset] & Stage.PROCESSED != 0
        plain &= np.array([params.logits for params in self._rows.sampling_of(at.row_ids[subset])])
        if not plain.any():
            return None
        # 0 for rows that report log-probabilities: these must not depend on the other rows, not by rounding either.
        subtracted = (largest / temperatures).where(self._rows.upload(plain), 0)
        return logits.new_zeros(len(logits)).index_copy_(0, index, subtracted)

    def _penalize_repetition(self, logits: Tensor, at: SampledPositions, subset: Array) -> None:
        index = self._rows.upload(subset)
        history = self._history(at, index, subset)
        penalty = self._rows.floats[history.sequence, Float.REPETITION]
        self._draw.penalize_repetition(logits, index, history, penalty)

    def _penalize_answer(self, logits: Tensor, at: SampledPositions, subset: Array) -> None:
        index = self._rows.upload(subset)
        history = self._history(at, index, subset)
        floats = self._rows.floats[history.sequence]
        presence, frequency = floats[:, Float.PRESENCE], floats[:, Float.FREQUENCY]
        self._draw.penalize_answer(logits, index, history, presence, frequency)

    def _penalize_repeats(self, logits: Tensor, at: SampledPositions, subset: Array) -> None:
        sets: dict[Breakers, list[int]] = {}
        for i, params in zip(subset, self._rows.sampling_of(at.row_ids[subset]), strict=True):
            assert params.breakers is not None
            sets.setdefault(params.breakers, []).append(i)
        for breakers, members in sets.items():
            some = np.array(members)
            index = self._rows.upload(some)
            history = self._history(at, index, some)
            floats, integers = self._rows.floats[history.sequence], self._rows.integers[history.sequence]
            repeats = Repeats(
                floats[:, Float.DRY_MULTIPLIER],
                floats[:, Float.DRY_BASE],
                integers[:, Integer.DRY_ALLOWED],
                integers[:, Integer.DRY_WINDOW],
                *self._breakers.of(breakers),
            )
            self._draw.penalize_repeats(logits, index, history, repeats)

    def _add_bias(self, logits: Tensor, at: SampledPositions, subset: Array) -> None:
        entries, upload = self._rows.sampling_of(at.row_ids[subset]), self._rows.upload
        token = np.concatenate([params.bias_ids for params in entries])
        of_row = np.repeat(subset, [params.bias_ids.size for params in entries])
        amount = np.concatenate([params.bias for params in entries])
        bias.add(logits, upload(of_row), upload(token), upload(amount))

    def _forbid_ends(self, logits: Tensor, at: SampledPositions, subset: Array) -> None:
        ends = [params.end_ids for params in self._rows.sampling_of(at.row_ids[subset])]
        row = self._rows.upload(np.repeat(subset, [ids.size for ids in ends]))
        early = at.ends < self._rows.integers[at.rows, Integer.FLOOR]
        floor.forbid(logits, row, self._rows.upload(np.concatenate(ends)), early[row])

    def _forbid_words(self, logits: Tensor, at: SampledPositions, subset: Array) -> None:
        """Forbid the last token of each bad word whose other tokens are the row's latest generated tokens."""
        lasts, of_row, word_of, tokens, backs, of_entry = [], [], [], [], [], []
        count = 0
        for i, params in zip(subset, self._rows.sampling_of(at.row_ids[subset]), strict=True):
            bad = params.words
            lasts.append(bad.last)
            of_row.append(np.full(bad.last.size, i))
            word_of.append(bad.word + count)
            tokens.append(bad.token)
            backs.append(bad.back)
            of_entry.append(np.full(bad.token.size, i))
            count += bad.last.size
        sizes = [count, count, *[sum(array.size for array in tokens)] * 4]
        sent = self._rows.upload(np.concatenate([*of_row, *lasts, *of_entry, *backs, *tokens, *word_of]))
        row, last, entry, back, token, word = torch.split(sent, sizes)
        place = at.ends[entry] - back
        known = self._rows.tokens[at.rows[entry], place.clamp(min=0)]
        generated = place >= self._rows.integers[at.rows[entry], Integer.PROMPT]
        words.forbid(logits, row, last, word, generated & (known == token))

    def _history(self, at: SampledPositions, index: Tensor, subset: Array) -> History:
        row, end = at.rows.index_select(0, index), at.ends.index_select(0, index)
        prompt = self._rows.integers[row, Integer.PROMPT]
        return History(self._rows.tokens, row, prompt, end, longest=int(at.positions[subset].max()))


_BEFORE_MASK = (  # in the order in which they are applied
    (Stage.REPETITION, Shaper._penalize_repetition),
    (Stage.FREQUENCY, Shaper._penalize_answer),
    (Stage.DRY, Shaper._penalize_repeats),
    (Stage.BIAS, Shaper._add_bias),
    (Stage.FLOOR, Shaper._forbid_ends),
    (Stage.WORDS, Shaper._forbid_words),
)
SHAPED: Final = reduce(or_, (stage for stage, _ in _BEFORE_MASK), Stage.NARROW)  # flags of the rows a Shaper changes


def limited(allowed: Array) -> Array:
    """Return [N] bool: whether the bitmask's row forbids any token."""
    limited: Array = (allowed != -1).any(-1)
    return limited
