"""The request fields that switch thoughts, set their effort or limit their tokens, under several APIs' names."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

Verbosity = Literal["low", "medium", "high"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # tokens; -1: no limit


class ThinkingOptions(Struct, kw_only=True):
    """The field `thinking` of Anthropic's, DeepSeek's and Z.ai's APIs."""

    type: Literal["enabled", "disabled", "adaptive", "auto"] | None = None
    budget_tokens: Budget | None = None


class ReasoningOptions(Struct, kw_only=True):
    """The field `reasoning` of OpenRouter's and OpenAI's APIs."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None


class TemplateKwargs(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The only variables that a request may set in the model's chat template, and the budget of thoughts."""

    enable_thinking: bool | UnsetType = UNSET
    thinking: bool | UnsetType = UNSET
    reasoning: bool | UnsetType = UNSET
    thinking_mode: Literal["enabled", "disabled", "adaptive"] | UnsetType = UNSET
    thinking_option: Literal["on", "off"] | UnsetType = UNSET
    reasoning_effort: Effort | Literal["no_think"] | UnsetType = UNSET
    thinking_effort: Effort | UnsetType = UNSET
    reasoning_strength: Effort | UnsetType = UNSET
    thinking_budget: Budget | UnsetType = UNSET
    thinking_token_budget: Budget | UnsetType = UNSET
    preserve_thinking: bool | UnsetType = UNSET
    preserved_thinking: bool | UnsetType = UNSET
    clear_thinking: bool | UnsetType = UNSET
    drop_thinking: bool | UnsetType = UNSET
    keep_past_thinking: bool | UnsetType = UNSET
    truncate_history_thinking: bool | UnsetType = UNSET
    date_string: Annotated[str, Meta(max_length=64)] | UnsetType = UNSET
