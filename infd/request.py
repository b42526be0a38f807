"""Types of a generation request, shared by all packages: sampling, adapter, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Final, Literal, TypeVar

from msgspec import Struct

from infd.constraint import Restriction


class FinishReason(Enum):
    """The reason why a choice finished. The values "stop" and "length" are those of OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


# What is reported as log-probability: of the model's logits, or after penalties, bias, masks, temperature and limits;
# the logits themselves, or normalized. A token that is left out has -inf.
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


class Chain(Struct, frozen=True):
    """Limits of llama.cpp. A row with these is limited in the order of llama.cpp's chain, before its temperature.

    top_n_sigma      largest distance from the likeliest token, in standard deviations of the logits; 0: no limit
    typical_p        probability mass of the tokens with the most typical surprisal; 1: no limit
    xtc_probability  chance that, of the tokens with at least xtc_threshold, all but the least likely are dropped
    dynatemp_range   largest difference of the temperature from `temperature`, as the entropy says; 0: it is fixed
    """

    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0


class Breakers(Struct, frozen=True):
    """Sequences of tokens that end a repetition. Each is a head and a tail, which follows it.

    tails  the tails, at most 31, each with 1 to 20 tokens
    heads  ids as little-endian int32: first the tokens that are sequences of their own, then the heads of each tail
    """

    heads: tuple[bytes, ...] = (b"",)
    tails: tuple[tuple[int, ...], ...] = ()


class Dry(Struct, frozen=True):
    """The DRY penalty of llama.cpp: multiplier * base ** (tokens repeated - allowed_length), for a token that would
    continue a repetition of at least allowed_length tokens.

    window  number of the latest tokens in which repetitions are searched; None: all
    """

    multiplier: float
    base: float
    allowed_length: int
    window: int | None
    breakers: Breakers


class Mirostat(Struct, frozen=True):
    """The limit of mirostat 1 or 2, which replaces all others and keeps the surprise of tokens near tau, in bits."""

    version: int
    tau: float
    eta: float


class SamplingParams(Struct, frozen=True, kw_only=True):
    """Parameters for sampling the next token from the logits. The HTTP schema has validated every value."""

    max_tokens: int  # at least 1
    min_tokens: int = 0  # end ids and stop strings are ignored until this many tokens are generated
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    chain: Chain | None = None  # None: the temperature comes before the limits
    dry: Dry | None = None
    mirostat: Mirostat | None = None
    logit_bias: Mapping[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # empty: all tokens
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that are never generated
    seed: int = 0  # seed of the sampling noise; each choice adds its index
    logprobs: int | None = None  # None: not requested; 0: of the chosen token; k: also of the k likeliest tokens
    logprob_ids: tuple[int, ...] = ()  # tokens reported instead of the likeliest
    logprobs_mode: LogprobsMode = "raw_logprobs"


class Generate(Struct, frozen=True, tag="generate"):
    """Sample tokens after the prompt until an end id or max_tokens tokens are generated.

    end_ids  generating any of these ids finishes the choice with "stop"
    """

    sampling: SamplingParams
    end_ids: frozenset[int] = frozenset()


class Score(Struct, frozen=True, tag="score"):
    """Compute log-probabilities of the prompt's tokens, all but the first.

    top  number of likeliest tokens to score at each position, in addition to the prompt's token
    """

    top: int = 0


# The result of pooling: a vector, a number per label, or either of these for each token.
PoolTask = Literal["embed", "classify", "token_embed", "token_classify"]


class Pool(Struct, frozen=True, tag="pool"):
    """Reduce the hidden states of the prompt to numbers, as the model's pooling settings say; no token is generated.

    dimensions  of embeddings, the leading numbers that are kept, before normalization (Matryoshka); None: all
    normalize   whether an embedding is divided by its Euclidean norm; None: as the model's settings say
    activation  whether the numbers of labels become probabilities; None: as the model's settings say
    skip        leading tokens, of an instruction, that pooling leaves out
    second      position of the second text's first token, for token types; None: the prompt is one text
    """

    task: PoolTask
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    skip: int = 0
    second: int | None = None


def by_token(task: PoolTask) -> bool:
    """Return whether each token has a row of numbers."""
    return task in ("token_embed", "token_classify")


def embeds(task: PoolTask) -> bool:
    """Return whether the numbers are embeddings, not those of labels."""
    return task in ("embed", "token_embed")


class ExpertSizes(Struct, frozen=True):
    """The sizes of a mixture of experts.

    layers   number of layers with experts
    experts  number of experts of a layer
    chosen   number of experts that a token chooses in a layer
    """

    layers: int
    experts: int
    chosen: int

    @property
    def token_bytes(self) -> int:
        """Bytes of the indices of the experts that a token chooses, in RoutedExperts."""
        return 2 * self.layers * self.chosen


class Route(Struct, frozen=True, tag="route"):
    """Report the experts that each token chose, in a model with experts. See RoutedExperts."""


class RoutedExperts(Struct, frozen=True):
    """The experts that consecutive tokens chose: [tokens, layers, chosen] int16, little-endian.

    layers  number of layers with experts, first to last
    chosen  number of experts that a token chooses in a layer
    values  of each token in each layer, the experts' indices in the order in which the token's router chose them
    """

    layers: int
    chosen: int
    values: bytes

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.chosen

    @property
    def tokens(self) -> int:
        return len(self.values) // self.token_bytes


class Pooled(Struct, frozen=True):
    """The numbers of a prompt: [rows, width] float32, little-endian, row after row; one row, or one for each token."""

    width: int
    values: bytes


Want = Generate | Score | Pool | Route
W = TypeVar("W", Generate, Score, Pool, Route)


def pick(kind: type[W], wants: Iterable[Want]) -> W | None:
    """Return the member of `wants` of type `kind`, or None."""
    for want in wants:
        if isinstance(want, kind):
            return want
    return None


class Tenant(Struct, frozen=True):
    """A group of API keys. Its requests share cached prefixes, and `share` of the device relative to other tenants'."""

    name: str = ""
    share: float = 1.0


ANYONE: Final = Tenant()  # of requests without an API key


class Request(Struct, frozen=True, kw_only=True):
    """One prompt, as token ids, and the outputs to compute.

    wants       at most one of each kind, in any order; empty: every choice finishes at once
    continues   index of a choice of its ticket's submission before: this prompt begins with that choice's; None: none
    constraint  restricts the text of each choice; None: any text. It is not a field of Generate, because executors
                receive masks and no constraints
    """

    id: str  # unique in this process
    prompt: tuple[int, ...]
    wants: tuple[Want, ...]
    choices: int = 1
    constraint: Restriction | None = None
    priority: int = 0  # lower is earlier
    adapter: str | None = None  # name; None: the base model
    tenant: str = ""  # cached prefixes are shared only between requests of one tenant
    share: float = 1.0  # the tenant's share of the device, relative to those of other tenants
    speculative: bool = True  # whether tokens may be drafted; drafts change no answer
    prediction: tuple[int, ...] = ()  # the answer that the client expects; it is drafted
    cache_salt: str = ""  # cached prefixes are shared only between requests of one tenant with equal salts
    continues: int | None = None

    @property
    def most_tokens(self) -> int:
        """The most tokens that the request may use: its prompt, which counts once, and the answers."""
        answer = sum(want.sampling.max_tokens for want in self.wants if isinstance(want, Generate))
        return len(self.prompt) + self.choices * answer


class Adapter(Struct, frozen=True):
    """One load of a LoRA adapter. The executor stores the weights.

    generation  unique number of the load, so that a reload under the same name is a different Adapter
    path        directory of the adapter's files
    """

    name: str
    generation: int
    path: str = ""

    def __repr__(self) -> str:
        return f"<Adapter {self.name}/{self.generation}>"


class AdapterFacts(Struct, frozen=True):
    """Properties of an adapter that an executor has read.

    base   base model named in the adapter's config
    rank   largest rank of its low-rank updates
    bytes  host memory of its weights
    stamp  identifies the state of its files (device, inode, size, mtime), to detect changes
    """

    base: str
    rank: int
    bytes: int
    stamp: tuple[tuple[int, ...], ...]


class TokenLogprobs(Struct, frozen=True):
    """Log-probabilities at one position, by `SamplingParams.logprobs_mode`; of a prompt, from the raw logits."""

    chosen: float  # of the sampled token, or of the prompt's token
    top_ids: tuple[int, ...] = ()  # ids of the likeliest tokens, likeliest first; or SamplingParams.logprob_ids
    top: tuple[float, ...] = ()  # log-probabilities of top_ids
    rank: int | None = None  # rank of the prompt's token, from 1, the likeliest; None for sampled tokens
