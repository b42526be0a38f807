"""The settings of a run of the load generator."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from infd.loadgen import prompts


class Settings(Struct, frozen=True, kw_only=True):
    """Parameters of a load run, which the report includes.

    concurrency   maximum requests in flight; None: no limit
    request_rate  mean arrivals per second (Poisson process); None: each request is sent once `concurrency` allows
    shared        fraction of each prompt that all prompts share as a prefix, if prompts is "shared-prefix"
    warmup        requests sent first, unmeasured
    body          extra fields for every request's body, sent unchecked
    """

    url: str
    model: str = ""  # empty: the first model that the server lists
    endpoint: Literal["chat", "completions"] = "chat"
    requests: Annotated[int, Meta(ge=1)] = 64
    concurrency: Annotated[int, Meta(ge=1)] | None = 8
    request_rate: Annotated[float, Meta(gt=0)] | None = None
    input_tokens: Annotated[int, Meta(ge=1)] = 128
    output_tokens: Annotated[int, Meta(ge=1)] = 128
    prompts: prompts.Kind = "random"
    shared: Annotated[float, Meta(ge=0, le=1)] = 0.5
    temperature: float | None = None  # None: the server's default
    ignore_eos: bool = False
    seed: int = 0
    warmup: Annotated[int, Meta(ge=0)] = 1
    timeout_s: Annotated[float, Meta(gt=0)] = 600.0
    body: dict[str, Any] = {}
