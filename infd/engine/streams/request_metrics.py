"""Count and time every choice for the metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.engine.streams.choice import ChoiceState
    from infd.telemetry.metrics import Metrics


class RequestMetrics:
    """Turns the stages of a choice into counts and durations. Times are monotonic seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def planned(self, choice: ChoiceState) -> None:
        """Record a choice that is planned for the first time."""
        assert choice.started is not None
        self._metrics.queue.observe(choice.started - choice.submitted)

    def delivered(self, choice: ChoiceState, tokens: int, now: float) -> None:
        """Record tokens that are about to be pushed to a choice's stream.

        `choice.last` is still the time of the previous tokens.
        """
        metrics = self._metrics
        metrics.generation_tokens += tokens
        if choice.first is not None:
            if tokens:
                metrics.inter_token.observe((now - choice.last) / tokens, tokens)
            return
        metrics.ttft.observe(now - choice.admitted)
        if choice.started is not None:
            metrics.prefill.observe(now - choice.started)
        if choice.prompt_tokens:
            cached = choice.seq.prompt_cached or 0
            metrics.prompt_tokens += choice.prompt_tokens
            metrics.prompt_tokens_cached += cached
            metrics.request_computed_tokens.observe(choice.prompt_tokens - cached)

    def ended(self, choice: ChoiceState, reason: str, now: float) -> None:
        """Record the terminal event of a choice."""
        metrics, seq = self._metrics, choice.seq
        metrics.terminal[reason] += 1
        if seq.adapter is not None:
            metrics.adapter_requests[seq.adapter.name] = metrics.adapter_requests.get(seq.adapter.name, 0) + 1
        metrics.e2e.observe(now - choice.admitted)
        metrics.request_prompt_tokens.observe(seq.prompt_tokens)
        metrics.request_preemptions.observe(seq.preemptions)
        if choice.first is not None and choice.started is not None:
            metrics.inference.observe(choice.last - choice.started)
        if seq.limit == seq.prompt_tokens:
            return  # nothing is generated: the prompt is scored or pooled
        metrics.request_generation_tokens.observe(seq.generated)
        metrics.request_max_tokens.observe(seq.limit - seq.prompt_tokens)
        if choice.first is not None:
            metrics.decode.observe(choice.last - choice.first)
            if seq.generated > 1:
                metrics.per_token.observe((choice.last - choice.first) / (seq.generated - 1))

    def retired(self, choices: Sequence[ChoiceState]) -> None:
        """Record the choices of a ticket whose reader has left."""
        self._metrics.request_choices.observe(choices[0].seq.request.choices)
        self._metrics.request_longest_tokens.observe(max(choice.seq.generated for choice in choices))
