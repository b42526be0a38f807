"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from infd.errors import InvalidRequest, Unsupported
from infd.http import beams, sampling
from infd.http.apis.api import Api
from infd.http.constraints import constrained
from infd.http.formats.completions import CompletionFormat
from infd.http.formats.openai import OPENAI_ERRORS
from infd.http.generation import Generation, Texts
from infd.http.schema.completions import CompletionRequest
from infd.text.infill import Gap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.config import Config

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default


def generation(request: CompletionRequest, body_bytes: int, config: Config) -> Generation:
    """Check a completion request and convert it to a Generation. Raises InvalidRequest, Unsupported."""
    prompts = _prompts(request)
    _check(request, len(prompts), config)
    returned, choices = request.n or 1, _choices(request)
    search = beams.requested(request, choices, config.limits)
    if search is not None:
        choices = returned  # the search returns the best of its beams
    # With echo, `logprobs` also requests the log-probabilities of the prompt's tokens.
    prompt_logprobs = {
        "prompt_logprobs": request.prompt_logprobs,
        "logprobs": request.logprobs if request.echo else None,
    }
    return Generation(
        fields=request,
        input=Texts(prompts),
        prompt_param="prompt",
        body_bytes=body_bytes,
        choices=choices,
        returned=returned,
        max_tokens=request.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        constrained=constrained(request),
        search=search,
        stop_strings=sampling.stop_strings(request),
        logprobs=0 if request.logprobs is None and choices > returned else request.logprobs,
        prompt_logprobs={field: k for field, k in prompt_logprobs.items() if k is not None},
        routed=bool(request.return_routed_experts),
        prompt_repeats=returned,
        echo=bool(request.echo),
    )


def _check(request: CompletionRequest, prompts: int, config: Config) -> None:
    """Refuse a request that is invalid for every model. Raises InvalidRequest, Unsupported."""
    sampling.check(request, config.limits)
    n, choices = request.n or 1, _choices(request)
    if choices < n:
        raise InvalidRequest(f"best_of {choices} is less than n {n}", param="best_of")
    if choices > config.limits.choices:
        raise InvalidRequest(f"best_of is at most {config.limits.choices}", param="best_of")
    if choices > n and request.stream and not request.use_beam_search:
        raise InvalidRequest("the best are known at the end only: they cannot be streamed", param="best_of")
    if choices * prompts > config.scheduler.max_waiting:
        raise InvalidRequest(
            f"{prompts} prompts with {choices} answers each are more than the queue ever holds", param="prompt"
        )
    if request.logprobs is not None and request.logprobs > config.limits.top_logprobs:
        raise InvalidRequest(f"logprobs is at most {config.limits.top_logprobs}", param="logprobs")
    if request.logprobs == -1 and request.echo:
        raise InvalidRequest("logprobs -1 is only for requests without echo: give their number", param="logprobs")
    if request.suffix and request.echo:
        raise Unsupported("echo with suffix", param="echo")
    if request.max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise InvalidRequest("max_tokens 0 is only for requests with echo or prompt_logprobs", param="max_tokens")


def _choices(request: CompletionRequest) -> int:
    return request.best_of or request.n or 1


def _prompts(request: CompletionRequest) -> Sequence[str | list[int] | Gap]:
    """Return the prompts: a text, texts, token ids or lists of token ids. Raises InvalidRequest for a mixture.

    With a suffix each prompt is the text before a gap.
    """
    prompts = _texts(request.prompt)
    return [Gap(prompt, request.suffix) for prompt in prompts] if request.suffix else prompts


def _texts(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    if kinds in ({str}, {list}):
        return cast("list[str | list[int]]", prompt)
    raise InvalidRequest("prompt is a text, texts, token ids, or lists of token ids, not a mixture", param="prompt")


COMPLETIONS: Final = Api(msgspec.json.Decoder(CompletionRequest), generation, CompletionFormat, OPENAI_ERRORS)
