"""What the engine tells the metrics: of a step, of a token's way, of a choice's life."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.engine.admission.ticket import ChoiceState
    from infd.engine.steps.loop import Issued
    from infd.scheduler.scheduler import Outcome, Scheduler
    from infd.telemetry.metrics import Metrics


class RequestMetrics:
    """Moments in, counts and durations out. Times are the engine's own, in monotonic seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def planned(self, flow: ChoiceState) -> None:
        """A choice stands in a plan for the first time."""
        assert flow.started is not None
        self._metrics.queue.observe(flow.started - flow.submitted)

    def committed(self, issued: Issued, outcomes: Sequence[Outcome], scheduler: Scheduler, now: float) -> None:
        """A step is over.

        `iteration_tokens` is what vLLM 0.33 observes: only steps that bring news of a choice, and a prompt's computed
        tokens all at once, in the step of its choice's first token.
        """
        metrics = self._metrics
        metrics.step.observe(now - issued.at)
        metrics.step_tokens.observe(issued.step.plan.tokens)
        if outcomes:
            metrics.iteration_tokens.observe(sum(each.prompt_computed + len(each.tokens) for each in outcomes))
        metrics.preemptions, metrics.steps_undone = scheduler.preemptions, scheduler.undone
        metrics.prefix_queries, metrics.prefix_hits = scheduler.prefix_queries, scheduler.prefix_hits

    def delivered(self, flow: ChoiceState, tokens: int, now: float) -> None:
        """Some tokens are about to be handed to a choice's reader; `flow.last` is still that of those before."""
        metrics = self._metrics
        metrics.generation_tokens += tokens
        if flow.first is not None:
            metrics.inter_token.observe((now - flow.last) / tokens, tokens)
            return
        metrics.ttft.observe(now - flow.admitted)
        if flow.started is not None:
            metrics.prefill.observe(now - flow.started)
        if flow.prompt_tokens:
            cached = flow.seq.prompt_cached or 0
            metrics.prompt_tokens += flow.prompt_tokens
            metrics.prompt_tokens_cached += cached
            metrics.request_computed_tokens.observe(flow.prompt_tokens - cached)

    def ended(self, flow: ChoiceState, reason: str, now: float) -> None:
        """A choice has had its terminal event."""
        metrics, seq = self._metrics, flow.seq
        metrics.terminal[reason] += 1
        if seq.adapter is not None:
            metrics.adapter_requests[seq.adapter.name] = metrics.adapter_requests.get(seq.adapter.name, 0) + 1
        metrics.e2e.observe(now - flow.admitted)
        metrics.request_prompt_tokens.observe(seq.prompt_tokens)
        metrics.request_generation_tokens.observe(seq.generated)
        metrics.request_max_tokens.observe(seq.limit - seq.prompt_tokens)
        if flow.first is not None and flow.started is not None:
            metrics.decode.observe(flow.last - flow.first)
            metrics.inference.observe(flow.last - flow.started)
            if seq.generated > 1:
                metrics.per_token.observe((flow.last - flow.first) / (seq.generated - 1))
