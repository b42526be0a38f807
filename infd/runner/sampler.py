"""Sample a step's tokens: mask and shape logits where a row requests it, choose tokens, report log-probabilities.

If all rows are greedy, the logits are read once, in the model's dtype. Logits of rows that are changed or scored are
converted to float32. Sampled tokens are appended to `Rows` on the device, so that the next step need not wait for the
host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from infd.kernels.families.draw import Drawing
from infd.rounding import ceil_div
from infd.runner.row_sampling import Float, Integer, Stage
from infd.runner.sampled import NOTHING_ALLOWED, SOUND, Likeliest, Sampled
from infd.runner.sampling import acceptance, scores
from infd.runner.shaper import SHAPED, Shaper, Shaping, limited

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.draw import Draw
    from infd.runner.rows import Rows
    from infd.runner.sampled import SampledPositions

    Array = npt.NDArray[Any]

_NONE: Final = np.empty(0, dtype=np.int64)


class Chosen(NamedTuple):
    """The tokens of n rows that were chosen from changed logits.

    logits   [n, vocab] float32, after all stages
    tokens   [n] int64
    verdict  [n] int64
    shift    [n] float32: what narrowing subtracted from the cooled logits; None: no row reports logits
    """

    logits: Tensor
    tokens: Tensor
    verdict: Tensor
    shift: Tensor | None


class Sampler:
    """Samples the next tokens of the sequences in `rows`."""

    def __init__(self, rows: Rows, draw: Draw) -> None:
        self._rows = rows
        self._draw = draw
        self._host_reads = rows.device.type == "cpu"  # without waiting for the device
        self._shaper = Shaper(rows, draw)
        self._each = torch.arange(rows.scratch + 1, device=rows.device)  # grows with the number of positions

    def likeliest(self, logits: Tensor) -> Likeliest:
        """Find the likeliest tokens of logits [N, vocab]."""
        largest, tokens = self._draw.largest(logits)
        # An infinite or invalid number minus itself is NaN; so NOT_FINITE is 1, and SOUND is 0.
        return Likeliest(largest, tokens, (largest - largest).ne(0).to(torch.int64))

    def __call__(
        self,
        logits: Tensor,
        at: SampledPositions,
        allowed: Array | None,
        likeliest: Likeliest | None = None,
        samples: Array | None = None,
    ) -> Sampled:
        """Choose a token for each row of logits [N, vocab], and append the tokens that are kept to `Rows`.

        Also computes the requested log-probabilities. The logits may be overwritten.

        samples    [S] number of sampled positions of each span; None: one of each span
        allowed    int32 [N, ceil(vocab / 32)] bitmask; None: all tokens are allowed
        likeliest  the result of `likeliest`, whose tokens have been appended to `Rows` if `samples` is None; or None
        """
        appended = likeliest is not None
        stages = self._stages(at)
        if allowed is None and not stages.any():  # no row requests more than its likeliest token
            _, tokens, verdict = likeliest or self.likeliest(logits)
            kept = self._append(at, tokens, verdict, samples, appended=appended)
            return Sampled(tokens, verdict, kept, [], None)
        processed = stages & Stage.PROCESSED != 0
        scoring = np.flatnonzero((stages & Stage.LOGPROBS != 0) & ~processed)
        raw = logits[self._rows.upload(scoring)].float() if scoring.size else None

        shaped = stages & SHAPED != 0
        unshaped = np.where(shaped, 0, stages)
        allowed = self._merge(allowed, at, np.flatnonzero(stages & Stage.ALLOWED))
        masked = np.flatnonzero(~shaped & limited(allowed)) if allowed is not None else _NONE
        if allowed is not None and masked.size and likeliest is not None and self._host_reads:
            masked = masked[~_surely_allowed(likeliest, masked, allowed, unshaped)]
        if allowed is not None and masked.size:
            largest, tokens, verdict = self._likeliest_allowed(logits, masked, allowed[masked])
            appended = False
        else:
            largest, tokens, verdict = likeliest or self.likeliest(logits)
        if (unshaped & Stage.RANDOM).any():
            tokens = self._drawn(logits, largest, tokens, at, unshaped)
            appended = False
        adapted = chosen = None
        if shaped.any():
            subset = np.flatnonzero(shaped)
            shaping = Shaping(at, stages, allowed)
            chosen = self._shaped(logits, verdict, shaping, subset)
            tokens, verdict = _merged(chosen, tokens, verdict, self._rows.upload(subset))
            adapted = self._shaper.adapt(chosen.logits, chosen.tokens, shaping, subset)
            appended = False
        kept = self._append(at, tokens, verdict, samples, appended=appended)

        scored: list[tuple[int, int]] = []
        values = None
        if chosen is not None and processed.any():
            index = self._rows.upload(np.flatnonzero(processed[shaped]))
            changed = chosen.logits.index_select(0, index)
            if chosen.shift is not None:
                changed += chosen.shift.index_select(0, index)[:, None]
            raw = changed if raw is None else torch.cat((raw, changed))
            scoring = np.concatenate((scoring, np.flatnonzero(processed)))
        if raw is not None:
            scored, values = self._score(raw, tokens, at, scoring)
        return Sampled(tokens, verdict, kept, scored, values, adapted)

    def _append(
        self, at: SampledPositions, tokens: Tensor, verdict: Tensor, samples: Array | None, *, appended: bool
    ) -> Tensor | None:
        """Append the samples to keep to `Rows`, unless they are appended; return their number of each span, or None."""
        kept = None
        if samples is not None:
            kept = self._keep(at, tokens, verdict, samples)
        elif not appended:
            self._rows.append(at.rows, at.ends, tokens)
        self._rows.least[at.row_ids] += 1  # once for each row: of a span's samples at least the first is kept
        return kept

    def _score(
        self, logits: Tensor, tokens: Tensor, at: SampledPositions, scoring: Array
    ) -> tuple[list[tuple[int, int]], scores.Scores]:
        """Compute the log-probabilities of the positions `scoring` [n] from their logits [n, vocab]."""
        rows = self._rows.sampling_of(at.row_ids[scoring])
        scored = [(int(i), params.logprob_ids.size or params.logprobs) for i, params in zip(scoring, rows, strict=True)]
        listed = plain = None
        if any(params.logprob_ids.size for params in rows):
            ids = np.full((len(rows), max(params.logprob_ids.size for params in rows)), -1, np.int64)
            for row, params in zip(ids, rows, strict=True):
                row[: params.logprob_ids.size] = params.logprob_ids
            listed = self._rows.upload(ids)
        if any(params.logits for params in rows):
            plain = self._rows.upload(np.array([params.logits for params in rows]))
        most = min(max(params.logprobs for params in rows), logits.shape[1])
        chosen = tokens[self._rows.upload(scoring)]
        return scored, scores.score(logits, chosen, most, listed, plain)

    def _keep(self, at: SampledPositions, tokens: Tensor, verdict: Tensor, samples: Array) -> Tensor:
        """Append the samples to keep to `Rows`, where drafts equal all but the last; return their number, [S]."""
        if self._host_reads:
            known = self._rows.on_host.last_known(at.row_ids, at.ends.numpy())
            sampled = [
                token if found == SOUND else None for token, found in zip(_list(tokens), _list(verdict), strict=True)
            ]
            counts = acceptance.kept_on_host(known, _list(samples), sampled.__getitem__)
            kept = torch.tensor(counts)
            last = torch.from_numpy(np.cumsum(samples) - samples + np.maximum(counts, 1) - 1)
            self._rows.append(at.rows[last], at.ends[last], tokens[last])
            return kept
        first, count = self._rows.upload(np.stack((np.cumsum(samples) - samples, samples)))
        inputs = self._rows.tokens[at.rows, at.ends - 1].to(torch.int64)
        kept = acceptance.kept(inputs, tokens, verdict == SOUND, first, count, int(samples.max()))
        last = first + kept.clamp(min=1) - 1
        self._rows.append(at.rows[last], at.ends[last], tokens[last])
        return kept

    def _likeliest_allowed(self, logits: Tensor, masked: Array, allowed: Array) -> Likeliest:
        """Mask some rows of the logits in place, and return the likeliest tokens of all rows.

        masked   [n]: indices of the rows to mask
        allowed  [n, ceil(vocab / 32)] int32: their bitmasks
        """
        index = self._rows.upload(masked)
        self._draw.forbid(logits, index, self._rows.upload(allowed))
        likeliest = self.likeliest(logits)
        nothing = likeliest.largest.index_select(0, index) == -torch.inf
        likeliest.verdict[index] = torch.where(nothing, NOTHING_ALLOWED, likeliest.verdict.index_select(0, index))
        return likeliest

    def _stages(self, at: SampledPositions) -> Array:
        """Return the Stage flags of each position's row. FLOOR is cleared if min_tokens are surely generated."""
        stages = self._rows.stages[at.row_ids]
        if not stages.any():
            return stages
        for i in np.flatnonzero(stages & Stage.FLOOR):
            if self._rows.least[at.row_ids[i]] >= self._rows.sampling[at.row_ids[i]].floor:
                stages[i] &= ~Stage.FLOOR
        return stages

    def _shaped(self, logits: Tensor, verdict: Tensor, shaping: Shaping, subset: Array) -> Chosen:
        """Choose the tokens of the rows `subset` [n] from changed logits."""
        if subset.size == len(shaping.stages):  # all rows: no gather
            return self._choose_shaped(logits.float(), verdict, shaping)
        index = self._rows.upload(subset)
        selected, sound = logits.index_select(0, index).float(), verdict.index_select(0, index)
        return self._choose_shaped(selected, sound, shaping.select(subset, index))

    def _choose_shaped(self, logits: Tensor, verdict: Tensor, shaping: Shaping) -> Chosen:
        """Shape logits [n, vocab] float32 in place, and choose tokens.

        verdict  [n]: SOUND or NOT_FINITE, found before shaping; the returned verdict may also be NOTHING_ALLOWED
        """
        shift = self._shaper.shape(logits, shaping)
        largest, tokens = self._draw.largest(logits)
        verdict = torch.where((verdict == SOUND) & ~(largest > -torch.inf), NOTHING_ALLOWED, verdict)
        return Chosen(logits, self._drawn(logits, largest, tokens, shaping.at, shaping.stages), verdict, shift)

    def _merge(self, allowed: Array | None, at: SampledPositions, limited: Array) -> Array | None:
        """Return the intersection of a bitmask with the allowed_token_ids of the rows `limited`.

        allowed  None: all tokens are allowed
        """
        if not limited.size:
            return allowed
        merged = np.full((len(at.row_ids), ceil_div(self._rows.vocab_size, 32)), -1, dtype=np.int32)
        if allowed is not None:
            merged[:] = allowed
        merged[limited] &= np.stack([params.allowed for params in self._rows.sampling_of(at.row_ids[limited])])
        return merged

    def _drawn(self, logits: Tensor, largest: Tensor, tokens: Tensor, at: SampledPositions, stages: Array) -> Tensor:
        """Replace the tokens of rows with Stage.RANDOM by random samples, and return all tokens.

        Rows with and without limits (Stage.TRUNCATE) are sampled by separate launches.
        """
        random = stages & (Stage.RANDOM | Stage.TRUNCATE)
        for truncated, flags in ((False, Stage.RANDOM), (True, Stage.RANDOM | Stage.TRUNCATE)):
            subset = np.flatnonzero(random == flags)
            if subset.size == len(stages):  # all rows: no gather
                if subset.size > len(self._each):
                    self._each = torch.arange(2 * subset.size, device=self._rows.device)
                each = self._each[: subset.size]
                return self._draw_some(logits, each, largest, at.rows, at.ends, truncated=truncated)
            if subset.size:
                index = self._rows.upload(subset)
                some = (values.index_select(0, index) for values in (largest, at.rows, at.ends))
                tokens.index_copy_(0, index, self._draw_some(logits, index, *some, truncated=truncated))
        return tokens

    def _draw_some(
        self, logits: Tensor, index: Tensor, largest: Tensor, row: Tensor, end: Tensor, *, truncated: bool
    ) -> Tensor:
        floats, integers = self._rows.floats.index_select(0, row), self._rows.integers.index_select(0, row)
        drawing = Drawing(
            rows=index,
            largest=largest,
            seed=integers[:, Integer.SEED_LOW : Integer.SEED_HIGH + 1],
            position=end.to(torch.int32),
            temperature=floats[:, Float.TEMPERATURE],
            top_k=integers[:, Integer.TOP_K],
            top_p=floats[:, Float.TOP_P],
            min_p=floats[:, Float.MIN_P],
        )
        return self._draw(logits, drawing, truncated=truncated)


def _merged(chosen: Chosen, tokens: Tensor, verdict: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tokens and verdicts of all rows, those at `index` from `chosen`."""
    if len(chosen.tokens) == len(tokens):
        return chosen.tokens, chosen.verdict
    return tokens.index_copy_(0, index, chosen.tokens), verdict.index_copy_(0, index, chosen.verdict)


def _list(values: Array | Tensor) -> list[int]:
    found: list[int] = values.tolist()
    return found


def _surely_allowed(likeliest: Likeliest, masked: Array, allowed: Array, stages: Array) -> Array:
    """Return for each of the rows `masked` whether its mask changes nothing: it is greedy, and its token is allowed.

    likeliest  of all rows, on the host
    allowed    [N, ceil(vocab / 32)] int32 bitmask
    stages     [N] Stage flags
    """
    tokens, verdict = likeliest.tokens.numpy()[masked], likeliest.verdict.numpy()[masked]
    fits = allowed[masked, tokens >> 5] >> (tokens & 31) & 1 != 0
    sure: Array = fits & (verdict == SOUND) & (stages[masked] & Stage.RANDOM == 0)
    return sure
