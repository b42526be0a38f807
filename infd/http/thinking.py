"""Convert the request fields about thoughts, under several servers' names, to a `Thinking`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from infd.errors import InvalidRequest
from infd.http.schema.thinking import ThinkingOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from infd.http.schema.chat import ChatRequest

_BUDGETS = ("thinking_token_budget", "thinking_budget")  # in chat_template_kwargs: maximum tokens of a thought


class Thinking(Struct, frozen=True):
    """A request's settings for the thoughts of its answers. None: absent from the request.

    effort     level of effort; "none": no thought
    preferred  level of effort; if the template refuses it, the nearest level applies
    enabled    whether the answers may contain thoughts
    budget     maximum tokens of a thought
    params     name of a setting -> the request field that sets it, for error messages
    """

    effort: str | None = None
    preferred: str | None = None
    enabled: bool | None = None
    budget: int | None = None
    params: Mapping[str, str] = {}


def thinking(request: ChatRequest) -> Thinking:
    """Return a request's settings for thoughts. Raises InvalidRequest if two fields contradict each other."""
    found: dict[str, Any] = {}
    params: dict[str, str] = {}
    for name, param, value in _fields(request):
        if value is None:
            continue
        if found.setdefault(name, value) != value:
            raise InvalidRequest(f"{params[name]} and {param} contradict each other: send one of them", param=param)
        params.setdefault(name, param)
    if found.get("budget") == -1:
        del found["budget"]
    if found.get("enabled") is not None and found["enabled"] == (found.get("effort") == "none"):
        first, second = params["enabled"], params.get("effort")
        if second is not None:
            raise InvalidRequest(f"{first} and {second} contradict each other: send one of them", param=second)
    return Thinking(**found, params=params)


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """Return the chat template's variables that chat_template_kwargs sets, without budgets."""
    kwargs = request.chat_template_kwargs
    variables = {} if kwargs is None else msgspec.to_builtins(kwargs)
    return {name: value for name, value in variables.items() if name not in _BUDGETS}


def _fields(request: ChatRequest) -> Iterator[tuple[str, str, Any]]:
    """Yield for each request field about thoughts: the name in Thinking, the field's path, the value or None."""
    yield "effort", "reasoning_effort", request.reasoning_effort
    yield "enabled", "enable_thinking", request.enable_thinking
    for name in ("thinking_token_budget", "thinking_budget", "thinking_budget_tokens"):
        yield "budget", name, getattr(request, name)
    if isinstance(request.thinking, ThinkingOptions):
        kind = request.thinking.type
        yield "enabled", "thinking.type", None if kind is None or kind == "auto" else kind != "disabled"
        yield "budget", "thinking.budget_tokens", request.thinking.budget_tokens
    else:
        yield "enabled", "thinking", request.thinking
    if request.reasoning is not None:
        yield "effort", "reasoning.effort", request.reasoning.effort
        yield "enabled", "reasoning.enabled", request.reasoning.enabled
        yield "budget", "reasoning.max_tokens", request.reasoning.max_tokens
    if request.chat_template_kwargs is not None:
        for name in _BUDGETS:
            value = getattr(request.chat_template_kwargs, name)
            yield "budget", f"chat_template_kwargs.{name}", None if value is msgspec.UNSET else value
