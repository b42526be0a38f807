"""The persistent batch: on the device, one row per running sequence.

The host writes a row when a sequence joins the batch, and when the sequence is granted pages; the sampler appends
sampled tokens. All joins of a plan are gathered on the host and written together, then all its grants. The next plan
may assign a row to another sequence before a step's results are read, so results are never read from rows.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from msgspec import Struct

from infd.kernels.families.rows import BatchState
from infd.kernels.reference.rows import RowKernels as Reference
from infd.request import Breakers, Chain, Generate, Mirostat, Pool, SamplingParams, pick
from infd.rounding import ceil_div, round_up
from infd.runner.arenas.arena import zeros

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from infd.kernels.families.rows import DecodeInputs, RowKernels, TokenPlaces
    from infd.runner.staging import Staging
    from infd.scheduler.plan import Draft, Grant, Join

    Array = npt.NDArray[Any]

GREEDY_BELOW = 1e-5  # at lower temperatures the argmax is returned: sampling would differ by rounding only


_NO_IDS = np.empty(0, np.int64)


class Stage(IntFlag):
    """The sampler's stages. Each row has the flags of the stages that its sequence requests."""

    REPETITION = 1
    FREQUENCY = 2
    BIAS = 4
    FLOOR = 8
    RANDOM = 16
    TRUNCATE = 32
    LOGPROBS = 64
    WORDS = 128
    ALLOWED = 256
    DRY = 512
    NARROW = 1024  # limited and cooled in place; then sampled at temperature 1, without limits
    MIROSTAT = 2048
    PROCESSED = 4096  # log-probabilities after all stages


class Words(Struct, frozen=True):
    """The bad words of one row.

    The E entries are the tokens of all words, without each word's last token.

    last   [W] int64: the last token of each word
    word   [E] int64: index of the entry's word
    token  [E] int64: the entry's token
    back   [E] int64: number of tokens from the entry's token to the word's last token
    """

    last: Array
    word: Array
    token: Array
    back: Array


class RowSampling(Struct, frozen=True):
    """A row's sampling parameters in host memory: those that only the host reads, and lists of varying length."""

    stages: int
    floor: int  # end ids are forbidden while fewer tokens, prompt included, are known; also in Rows.integers
    logprobs: int
    bias_ids: Array  # [B] int64
    bias: Array  # [B] float32
    end_ids: Array  # [E] int64
    words: Words
    allowed: Array  # [ceil(vocab / 32)] int32 bitmask; empty: all tokens are allowed
    breakers: Breakers | None = None  # of the DRY penalty
    logprob_ids: Array = _NO_IDS  # [L] int64
    ends: frozenset[int] = frozenset()  # the end ids
    logits: bool = False  # whether logits are reported as log-probabilities


class Float(IntEnum):
    """Columns of `Rows.floats`.

    TEMPERATURE  temperature of the random sample; 1 for rows that are narrowed
    COOLING      temperature of rows that are narrowed; LATE: 1 if limits precede it
    MU           mirostat's largest surprise, in bits; changes with each sampled token
    """

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5
    COOLING = 6
    LATE = 7
    TOP_N_SIGMA = 8
    TYPICAL_P = 9
    XTC_PROBABILITY = 10
    XTC_THRESHOLD = 11
    RANGE = 12
    EXPONENT = 13
    DRY_MULTIPLIER = 14
    DRY_BASE = 15
    MIROSTAT = 16  # version; 0: off
    TAU = 17
    ETA = 18
    MU = 19


class Integer(IntEnum):
    """Columns of `Rows.integers`."""

    SEED_LOW = 0
    SEED_HIGH = 1
    TOP_K = 2
    PROMPT = 3
    FLOOR = 4
    DRY_ALLOWED = 5
    DRY_WINDOW = 6


_UNSAMPLED = Generate(SamplingParams(max_tokens=1, temperature=0.0))  # for a sequence that is scored, not sampled
_NOTHING = RowSampling(
    0, 0, 0, _NO_IDS, np.empty(0, np.float32), _NO_IDS, Words(_NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS), _NO_IDS
)


class HostRows(NamedTuple):
    """The known tokens of rows on a CPU, read and appended without torch."""

    tokens: Array  # see Rows
    length: Array

    def last_known(self, row: Array, end: Array) -> list[int]:
        """Return the token before position `end` of each row."""
        known: list[int] = self.tokens[row, end - 1].tolist()
        return known

    def append(self, row: Array, end: Array, token: Sequence[int]) -> None:
        """Do what Rows.append does."""
        self.tokens[row, end] = token
        self.length[row] = end + 1


class Rows:
    """One row per sequence, and a last row, `scratch`, for padding. The page tables of `scratch` contain page 0 only.

    tokens    [R + 1, max_len] int32: all known tokens, prompt and sampled; then drafts, and tokens that were not kept
    length    [R + 1] int64: number of known tokens; a plan may assume more
    tables    [R + 1, G, pages] int32: page ids by group and page index; 0: no page
    state     tokens, length and tables, as the kernels' argument
    slots     [R + 1] uint16, on the host: slot of each row's adapter; 0: the model without adapter
    regimes   [R + 1] int64, on the host: regime of each row's rotary angles, see Regimes
    floats    [R + 1, len(Float)] float32: sampling parameters
    integers  [R + 1, len(Integer)] int32: sampling parameters
    stages    [R + 1] uint16, on the host: Stage flags of each row
    least     [R + 1] int64, on the host: lower bound of `length`; equal to it if the row never had drafts
    sampling  on the host: by row, the sampling parameters that `floats` and `integers` do not contain
    """

    def __init__(
        self,
        *,
        rows: int,
        max_len: int,
        page_tokens: Sequence[int],
        vocab_size: int,
        staging: Staging,
        kernels: RowKernels | None = None,
    ) -> None:
        """Allocate `rows` rows and the scratch row.

        max_len      most tokens of a sequence
        page_tokens  tokens per page, by page group
        staging      copies to the device of the rows
        kernels      None: the reference implementation
        """
        self.staging = staging
        self.device = device = staging.device
        self._kernels = kernels or Reference()
        self.max_len = max_len
        self.vocab_size = vocab_size
        self.scratch = rows
        pages = max((ceil_div(max_len, size) for size in page_tokens), default=0)
        self.tokens = zeros((rows + 1, max_len), torch.int32, device)
        self.length = torch.ones(rows + 1, dtype=torch.int64, device=device)
        self.tables = torch.zeros((rows + 1, len(page_tokens), pages), dtype=torch.int32, device=device)
        self.state = BatchState(self.tokens, self.length, self.tables)
        self.floats = torch.zeros((rows + 1, len(Float)), dtype=torch.float32, device=device)
        self.integers = torch.zeros((rows + 1, len(Integer)), dtype=torch.int32, device=device)
        self.stages = np.zeros(rows + 1, dtype=np.uint16)
        self.slots = np.zeros(rows + 1, dtype=np.uint16)
        self.regimes = np.zeros(rows + 1, dtype=np.int64)
        self.least = np.zeros(rows + 1, dtype=np.int64)
        self.sampling: list[RowSampling] = [_NOTHING] * (rows + 1)

    def stage(self, joins: Sequence[Join], grants: Sequence[Grant], drafts: Sequence[Draft] = ()) -> None:
        """Write a plan's joins, grants and drafts, in this order.

        Raises ValueError or OverflowError for an invalid join.
        """
        for join in joins:
            pools = pick(Pool, join.wants) is not None
            self.sampling[join.row] = sampling = _NOTHING if pools else _row_sampling(join, self.vocab_size)
            self.stages[join.row] = sampling.stages
            self.slots[join.row] = join.slot
            self.regimes[join.row] = join.regime
            self.least[join.row] = len(join.tokens)
        if joins:
            self._join([(join, self.checked(join, np.int32)) for join in joins])
        if grants:
            row, group, index, page = self.upload(
                np.array([(g.row, g.group, g.index, g.page) for g in grants], dtype=np.int64).T
            )
            self.tables.index_put_((row, group, index), page.to(torch.int32))
        if drafts:
            self._draft(drafts)

    @cached_property
    def on_host(self) -> HostRows:
        """The known tokens as arrays, on a CPU."""
        return HostRows(self.tokens.numpy(), self.length.numpy())

    def sampling_of(self, row_ids: Array) -> list[RowSampling]:
        """Return the entries of `sampling` of some rows."""
        return [self.sampling[row] for row in row_ids]

    def append(self, row: Tensor, end: Tensor, token: Tensor) -> None:
        """Append a sampled token to each row, at position `end`. row, end, token: [N] int64."""
        self._kernels.append(self.state, row, end, token)

    def place_tokens(self, row: Tensor, bound: Tensor, span: Tensor, offset: Tensor) -> TokenPlaces:
        """Locate a step's tokens; see families.rows.RowKernels."""
        return self._kernels.place_tokens(self.state, row, bound, span, offset)

    def place_pages(
        self, group: int, row: Tensor, pages: int, token_row: Tensor, position: Tensor, page_tokens: int
    ) -> tuple[Tensor, Tensor]:
        """Return the pages of spans, and the slots of tokens, in page group `group`; see families.rows.RowKernels."""
        return self._kernels.place_pages(self.tables[:, group], row, pages, token_row, position, page_tokens)

    def gather_inputs(self, inputs: DecodeInputs) -> None:
        """Fill the input buffers of a decoding step with the last known token of each row."""
        self._kernels.gather_inputs(self.state, inputs)

    def upload(self, array: Array) -> Tensor:
        """Copy an array to the device."""
        return self.staging.up(array)

    def checked(self, join: Join, dtype: type[np.signedinteger[Any]]) -> Array:
        """Return the tokens of a join, [n] of `dtype`. Raises ValueError if n or a token id is out of range."""
        tokens = np.array(join.tokens, dtype)
        if not 0 < len(tokens) <= self.max_len:
            raise ValueError(f"a sequence of {len(tokens)} tokens; a row holds 1 to {self.max_len}")
        if tokens.view(f"u{tokens.itemsize}").max() >= self.vocab_size:  # negative ids too
            raise ValueError(f"a token id outside 0..{self.vocab_size - 1}")
        return tokens

    def _join(self, joins: Sequence[tuple[Join, Array]]) -> None:
        """Write the rows of `joins`: pairs of a join and its tokens [n] int32."""
        count, longest = len(joins), max(len(tokens) for _, tokens in joins)
        history = np.zeros((count, longest), dtype=np.int32)
        for i, (_, tokens) in enumerate(joins):
            history[i, : len(tokens)] = tokens
        row = self.upload(np.array([join.row for join, _ in joins], dtype=np.int64))
        self.staging.write(self.tokens, row, history)
        self.staging.write(self.length, row, np.array([len(tokens) for _, tokens in joins], dtype=np.int64))
        if self.tables.numel():
            tables = np.zeros((count, *self.tables.shape[1:]), dtype=np.int32)
            for i, (join, _) in enumerate(joins):
                for group, table in enumerate(join.tables):
                    tables[i, group, : len(table)] = table
            self.staging.write(self.tables, row, tables)
        if any(pick(Pool, join.wants) is None for join, _ in joins):  # rows that are pooled are not sampled
            columns = [_columns(join, self.vocab_size, self.max_len) for join, _ in joins]
            self.staging.write(self.floats, row, np.array([floats for floats, _ in columns]))
            integers = np.array([integers for _, integers in columns]).astype(np.int32)
            self.staging.write(self.integers, row, integers)

    def _draft(self, drafts: Sequence[Draft]) -> None:
        """Write drafts behind the known tokens of their rows."""
        for each in drafts:
            self.least[each.row] = max(self.least[each.row], each.start)
        row, place, draft = self.upload(
            np.array([(d.row, at, token) for d in drafts for at, token in enumerate(d.tokens, d.start)]).T
        )
        known = self.tokens[row, place]
        self.tokens.index_put_((row, place), torch.where(place < self.length[row], known, draft.to(torch.int32)))


def _columns(join: Join, vocab_size: int, max_len: int) -> tuple[Array, Array]:
    """Return the row's sampling parameters in the order of Float and of Integer."""
    s = (pick(Generate, join.wants) or _UNSAMPLED).sampling
    seed = join.seed & 0xFFFFFFFFFFFFFFFF
    floats, integers = np.zeros(len(Float), np.float32), np.zeros(len(Integer), np.int64)
    floats[: Float.COOLING] = (
        1.0 if _narrows(s) else s.temperature,
        s.top_p,
        s.min_p,
        s.repetition_penalty,
        s.presence_penalty,
        s.frequency_penalty,
    )
    integers[: Integer.DRY_ALLOWED] = (
        seed & 0xFFFFFFFF,
        seed >> 32,
        min(s.top_k, vocab_size),
        join.prompt_tokens,
        min(join.prompt_tokens + s.min_tokens, 2**31 - 1),
    )
    if s.dry is not None:
        floats[Float.DRY_MULTIPLIER], floats[Float.DRY_BASE] = s.dry.multiplier, s.dry.base
        window = max_len if s.dry.window is None else min(s.dry.window, max_len)
        integers[Integer.DRY_ALLOWED :] = s.dry.allowed_length, window
    if _narrows(s):
        chain = s.chain or Chain()
        floats[Float.COOLING : Float.DRY_MULTIPLIER] = (
            s.temperature if s.temperature >= GREEDY_BELOW else 1.0,
            s.chain is not None,
            chain.top_n_sigma,
            chain.typical_p,
            chain.xtc_probability,
            chain.xtc_threshold,
            chain.dynatemp_range if s.temperature >= GREEDY_BELOW else 0.0,
            chain.dynatemp_exponent,
        )
        if s.chain is None and s.temperature < GREEDY_BELOW:  # the argmax needs no limits
            integers[Integer.TOP_K], floats[Float.TOP_P], floats[Float.MIN_P] = 0, 1.0, 0.0
    if (mirostat := _mirostat(s)) is not None:
        mu = 2 * mirostat.tau if join.mu is None else join.mu
        integers[Integer.TOP_K], floats[Float.TOP_P], floats[Float.MIN_P] = 0, 1.0, 0.0
        floats[Float.COOLING : Float.DRY_MULTIPLIER] = s.temperature, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0
        floats[Float.MIROSTAT :] = mirostat.version, mirostat.tau, mirostat.eta, mu
    return floats, integers


def _mirostat(s: SamplingParams) -> Mirostat | None:
    """Return the parameters of mirostat if the row's tokens are random."""
    return s.mirostat if s.temperature >= GREEDY_BELOW else None


def _processed(s: SamplingParams) -> bool:
    return s.logprobs is not None and s.logprobs_mode.startswith("processed")


def _narrows(s: SamplingParams) -> bool:
    return s.chain is not None or _mirostat(s) is not None or _processed(s)


def _row_sampling(join: Join, vocab_size: int) -> RowSampling:
    generate = pick(Generate, join.wants) or _UNSAMPLED
    s = generate.sampling
    stages = Stage(0)
    if s.repetition_penalty != 1.0:
        stages |= Stage.REPETITION
    if s.presence_penalty or s.frequency_penalty:
        stages |= Stage.FREQUENCY
    if s.logit_bias:
        stages |= Stage.BIAS
    if s.min_tokens and generate.end_ids:
        stages |= Stage.FLOOR
    if s.temperature >= GREEDY_BELOW:
        stages |= Stage.RANDOM
        if not _narrows(s) and (s.top_k > 0 or s.top_p < 1.0 or s.min_p > 0.0):
            stages |= Stage.TRUNCATE
    if s.dry is not None:
        stages |= Stage.DRY
    if _narrows(s):
        stages |= Stage.NARROW
    if _mirostat(s) is not None:
        stages |= Stage.MIROSTAT
    if s.logprobs is not None:
        stages |= Stage.LOGPROBS
        if _processed(s):
            stages |= Stage.PROCESSED
    if s.bad_words:
        stages |= Stage.WORDS
    if s.allowed_token_ids:
        stages |= Stage.ALLOWED
    bias_ids = np.fromiter(s.logit_bias.keys(), dtype=np.int64, count=len(s.logit_bias))
    _check_known(bias_ids, vocab_size, "logit_bias")
    logprob_ids = np.array(s.logprob_ids, dtype=np.int64)
    _check_known(logprob_ids, vocab_size, "logprob_token_ids")
    return RowSampling(
        stages=int(stages),
        floor=join.prompt_tokens + s.min_tokens,
        logprobs=s.logprobs or 0,
        bias_ids=bias_ids,
        bias=np.fromiter(s.logit_bias.values(), dtype=np.float32, count=len(s.logit_bias)),
        end_ids=np.array([i for i in generate.end_ids if 0 <= i < vocab_size], dtype=np.int64),
        words=_words(s.bad_words, vocab_size),
        allowed=_bitmask(s.allowed_token_ids, vocab_size) if s.allowed_token_ids else _NO_IDS,
        breakers=None if s.dry is None else s.dry.breakers,
        logprob_ids=logprob_ids,
        logits=s.logprobs_mode.endswith("logits"),
        ends=generate.end_ids,
    )


def _words(words: Sequence[Sequence[int]], vocab_size: int) -> Words:
    before = [(n, token, len(word) - 1 - i) for n, word in enumerate(words) for i, token in enumerate(word[:-1])]
    number, token, back = np.array(before, dtype=np.int64).reshape(-1, 3).T
    last = np.array([word[-1] for word in words], dtype=np.int64)
    _check_known(last, vocab_size, "bad_words")
    return Words(last, number, token, back)


def _bitmask(tokens: Sequence[int], vocab_size: int) -> Array:
    ids = np.array(tokens, dtype=np.int64)
    _check_known(ids, vocab_size, "allowed_token_ids")
    allowed = np.zeros(round_up(vocab_size, 32), dtype=bool)
    allowed[ids] = True
    return np.packbits(allowed, bitorder="little").view("<i4")


def _check_known(ids: Array, vocab_size: int, name: str) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(f"{name} names a token outside 0..{vocab_size - 1}")
