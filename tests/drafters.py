"""Drafters that know the fake model's answers, and are wrong as often as a test wants."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from msgspec.structs import replace

from infd.request import Generate, pick
from tests.engine.fake_grammars import constrained
from tests.fakes import FULL, VOCAB, continuation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.request import Adapter, Request
    from infd.scheduler.layout import CacheLayout


class Oracle:
    """Drafts an answer that it knows, each token wrong with a given probability; sometimes drafts too few tokens.

    answer  all tokens that the model generates after the prompt
    """

    sure = False
    run = 0

    def __init__(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        *,
        wrong: float = 0.0,
        short: bool = False,
        seed: int = 0,
        vocab: int = VOCAB,
    ) -> None:
        self._known = [*prompt, *answer]
        self._wrong = wrong
        self._short = short
        self._vocab = vocab
        self._random = Random(seed)

    @classmethod
    def of(
        cls,
        prompt: Sequence[int],
        count: int,
        *,
        seed: int = 0,
        layout: CacheLayout = FULL,
        adapter: Adapter | None = None,
        wrong: float = 0.0,
        short: bool = False,
    ) -> Oracle:
        """Return a drafter for the first `count` tokens of the fake model's answer."""
        answer = continuation(list(prompt), count, seed=seed, layout=layout, adapter=adapter)
        return cls(prompt, answer, wrong=wrong, short=short, seed=seed)

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        if self._short:
            most = self._random.randint(0, most)
        right = self._known[len(tokens) : len(tokens) + most]
        return [(token + 1) % self._vocab if self._random.random() < self._wrong else token for token in right]

    def finish(self, tokens: Sequence[int]) -> None:
        """No-op: the answer is known already."""


class Guesses:
    """Implements Drafting with Oracles of the fake model's answers, of constrained ones too."""

    def __init__(self, most: int = 3, *, wrong: float = 0.2, tokens: int = 60) -> None:
        self.most = most
        self._wrong = wrong
        self._tokens = tokens

    def drafter(self, request: Request, root: bytes) -> Oracle:
        prompt, generate = list(request.prompt), pick(Generate, request.wants)
        seed = generate.sampling.seed if generate else 0
        if request.constraint is None:
            answer = continuation(prompt, self._tokens, seed=seed)
        else:
            sound = replace(request.constraint, fails_at=None, by_mask=False)
            answer = constrained(prompt, sound, seed=seed)  # type: ignore[arg-type]
        return Oracle(prompt, answer, wrong=self._wrong, seed=seed)
