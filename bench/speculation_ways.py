"""Ways to decode with one loaded model: its drafter is exchanged while no request is in flight."""

from __future__ import annotations

import time
from typing import Any

from speculation_figures import Answered, Count

from infd import LLM
from infd.config import SchedulerConfig
from infd.drafting.select import drafting
from infd.http.apis.chat import CHAT
from infd.http.apis.completions import COMPLETIONS
from infd.http.schema.chat import ChatResponse
from infd.http.schema.completions import CompletionResponse
from infd.scheduler.speculation import Speculation

WAYS = ("off", "ngram", "suffix", "declined")


class Loaded:
    """A loaded model, whose drafter is exchanged."""

    def __init__(self, model: str, streams: int, settings: dict[str, Any]) -> None:
        # Loaded with drafts, so that the costs of their steps are measured.
        self._llm = LLM(model, speculative="ngram", max_num_seqs=streams, **settings)

    def close(self) -> None:
        self._llm.close()

    @property
    def _backend(self) -> Any:
        return self._llm._server._backend

    @property
    def core(self) -> Any:
        return self._backend.engine.core

    @property
    def row_costs(self) -> tuple[tuple[int, float], ...]:
        return self.core.capacity.row_costs

    def encode(self, text: str) -> list[int]:
        return self._backend.model().tokenizer.encode(text, add_special_tokens=False)

    def speculation(self, most: int) -> Speculation:
        return Speculation(self.core.scheduler.cache, most, self.row_costs)

    def use(self, way: Way) -> None:
        """Let requests be answered by another way, once the last step in flight has ended."""
        core = self.core
        while core.loop.in_flight or len(core.in_flight):
            time.sleep(1e-4)
        core.in_flight._drafting = way.drafting
        self.speculate(way)

    def speculate(self, way: Way) -> None:
        """Let a way choose the drafts of the steps that follow."""
        core = self.core
        if core.scheduler.speculation is not way.speculation:
            way.speculation.committed()  # other tokens are known than those that it considered last
            core.scheduler.speculation = way.speculation
        core.loop._constraints._most_drafts = way.drafting.most
        core.loop._constraints._seeks = way.speculation.pays_alone

    def answers(self, requests: list[dict[str, Any]]) -> list[Any]:
        kinds = {True: (CHAT, ChatResponse), False: (COMPLETIONS, CompletionResponse)}
        api, kind = kinds["messages" in requests[0]]
        return self._llm._answer(api, requests, kind, progress=False)


class Way:
    """One setting of --speculative for a loaded model; or `declined`: suffixes, which each request turns off."""

    def __init__(self, name: str, loaded: Loaded, speculative: str) -> None:
        self.name = name
        self._declines = speculative == "declined"
        self._settings = SchedulerConfig(speculative="suffix" if self._declines else speculative)
        self._loaded = loaded
        self.forget()
        self.speculation = loaded.speculation(self.drafting.most)

    def forget(self) -> None:
        """Forget earlier answers, but not what was learned of costs and agreement."""
        self.drafting = drafting(self._settings)

    def answer(self, requests: list[dict[str, Any]]) -> Answered:
        """Answer requests at once."""
        loaded = self._loaded
        loaded.use(self)
        if self._declines:
            requests = [{**each, "speculative": False} for each in requests]
        before, began = self._drafts(), time.perf_counter()
        answers = loaded.answers(requests)
        took = time.perf_counter() - began
        spans, drafted, kept = (b - a for a, b in zip(before, self._drafts(), strict=True))
        tokens = sum(each.usage.completion_tokens for each in answers)
        if len(requests) == 1:
            tokens, took = tokens - 1, answers[0].timings.predicted_ms / 1000
        found = [each.choices[0].token_ids for each in answers]
        return Answered(Count(tokens, took, spans, drafted, kept), found)

    def _drafts(self) -> tuple[int, int, int]:
        counted = self.speculation
        return counted.drafts, counted.drafted, sum(counted.accepted)
