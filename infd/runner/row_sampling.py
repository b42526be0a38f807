"""A row's sampling parameters: on the device, numbers in columns; on the host, stages and lists of varying length."""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct

from infd.request import Breakers, Chain, Generate, Mirostat, SamplingParams, pick
from infd.rounding import round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from infd.scheduler.plan import Join

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


_SCORED = Generate(SamplingParams(max_tokens=1, temperature=0.0))  # for a sequence that is scored, not sampled
UNSAMPLED = RowSampling(  # for a row that is pooled
    0, 0, 0, _NO_IDS, np.empty(0, np.float32), _NO_IDS, Words(_NO_IDS, _NO_IDS, _NO_IDS, _NO_IDS), _NO_IDS
)


def row_sampling(join: Join, vocab_size: int) -> RowSampling:
    """Return the parameters that stay on the host. Raises ValueError if a token id is out of range."""
    generate = pick(Generate, join.wants) or _SCORED
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


def columns(join: Join, vocab_size: int, max_len: int) -> tuple[Array, Array]:
    """Return the parameters on the device: float32 in the order of Float, int64 in the order of Integer."""
    s = (pick(Generate, join.wants) or _SCORED).sampling
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
