"""The settings of a run of the load generator."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from infd.loadgen.datasets.spec import File, Synthetic

Task = Literal["generate", "embed", "classify", "rerank"]
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Fields of a request without which the server samples by its own defaults."""


class Settings(Struct, frozen=True, kw_only=True):
    """Parameters of a load run, which the report includes.

    task          the operation under load; all but generate have a route of their own, and no output tokens
    inputs        number of texts in a request that does not generate: inputs, or documents of one query
    concurrency   maximum requests in flight; None: no limit
    request_rate  mean arrivals per second; None: each request is sent once `concurrency` allows, or at the time that
                  the dataset gives
    burstiness    shape of the gamma distribution of the times between arrivals: 1 is a Poisson process, less comes in
                  bursts, more is regular
    models        weights of several models or adapters, by name; empty: `model` alone
    assignment    how requests are divided among `models`
    objectives_ms service level objectives by name (goodput.py)
    exact         whether prompts have exact lengths, by the server's tokenizer; otherwise all servers get equal texts
    warmup        requests sent first, unmeasured
    body          extra fields for every request's body, sent unchecked
    """

    url: str
    model: str = ""  # empty: the first model that the server lists
    endpoint: Literal["chat", "completions"] = "chat"
    task: Task = "generate"
    inputs: Annotated[int, Meta(ge=1, le=2048)] = 1
    requests: Annotated[int, Meta(ge=1)] = 64
    concurrency: Annotated[int, Meta(ge=1)] | None = 8
    request_rate: Annotated[float, Meta(gt=0)] | None = None
    burstiness: Annotated[float, Meta(gt=0)] = 1.0
    dataset: Synthetic | File = Synthetic()
    models: dict[str, Annotated[float, Meta(gt=0)]] = {}
    assignment: Literal["random", "round-robin"] = "random"
    objectives_ms: dict[str, float] = {}
    exact: bool = True
    seed: int = 0
    warmup: Annotated[int, Meta(ge=0)] = 1
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    body: dict[str, Any] = {}

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that requests carry; the server's defaults apply for all others."""
        return {name: self.body[name] for name in SAMPLING if name in self.body}
