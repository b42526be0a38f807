"""The inputs of OpenAI's and vLLM's requests to pool prompts, and the fields that those requests share."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from infd.errors import InvalidRequest
from infd.http.conversation import final_text, template_messages
from infd.http.generation import Conversation
from infd.http.pooling.pooling import Asker, Pooling, check_count, numbered, require_text
from infd.http.sampling import refuse_unsupported
from infd.http.schema.chat import Message
from infd.text.cutting import Passage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.config import Config, LimitsConfig
    from infd.http.pooling.pooling import Input
    from infd.http.schema.pooling import InputFields, PoolingFields
    from infd.request import PoolTask


def asker(request: PoolingFields, limits: LimitsConfig) -> Asker:
    """Check the fields that requests share, and return those that are not about prompts.

    Raises InvalidRequest, Unsupported.
    """
    refuse_unsupported(request, request.NEUTRAL)
    if request.truncate_prompt_tokens == 0:
        raise InvalidRequest("a prompt has at least one token", param="truncate_prompt_tokens")
    if len(request.cache_salt or "") > limits.cache_salt:
        raise InvalidRequest(f"cache_salt is at most {limits.cache_salt} characters", param="cache_salt")
    return Asker(
        model=request.model,
        priority=request.priority,
        request_id=request.request_id,
        cache_salt=request.cache_salt or "",
    )


def check_ends(add_generation_prompt: bool | None, continue_final_message: bool | None) -> None:
    """Raise InvalidRequest if a conversation would both end with an open message and open another."""
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )


def pooling(request: InputFields, body_bytes: int, config: Config, task: PoolTask, **others: Any) -> Pooling:
    """Return the Pooling of a request. Raises InvalidRequest, Unsupported.

    others  further fields of the Pooling
    """
    common = asker(request, config.limits)
    check_ends(request.add_generation_prompt, request.continue_final_message)
    if (request.input is None) == (request.messages is None):
        raise InvalidRequest("give either input or messages", param="input")
    param = "input" if request.messages is None else "messages"
    found, several = _inputs(request, body_bytes)
    check_count(len(found), config, param)
    return Pooling(
        asker=common,
        inputs=found,
        where=numbered(param, several=several),
        body_bytes=body_bytes,
        task=task,
        keep=request.truncate_prompt_tokens,
        side=request.truncation_side or "right",
        add_special_tokens=request.add_special_tokens,
        activation=request.use_activation,
        **others,
    )


def _inputs(request: InputFields, body_bytes: int) -> tuple[Sequence[Input], bool]:
    """Return the inputs, and whether the request lists several. Raises InvalidRequest."""
    given: Any = request.input if request.messages is None else request.messages
    if isinstance(given, str):
        return [_text(given, "input")], False
    kind = _kind(given, "input" if request.messages is None else "messages")
    match kind:
        case "texts":
            return [_text(text, f"input[{number}]") for number, text in enumerate(given)], True
        case "ids":
            return [given], False
        case "conversation":
            return [_conversation(given, request, body_bytes)], False
        case "several ids":
            return given, True
        case "conversations":
            return [_conversation(turns, request, body_bytes) for turns in given], True
        case _:
            return [], True


def _kind(
    given: list[Any], param: str
) -> Literal["texts", "ids", "conversation", "several ids", "conversations", "nothing"]:
    """Return the kind of a list's items. Raises InvalidRequest for a mixture."""
    if not given:
        return "nothing"
    kinds = {type(each) for each in given}
    if kinds == {list}:
        kinds = {type(each) for inner in given for each in inner}
        if kinds == {Message}:
            for number, turns in enumerate(given):
                if not turns:
                    raise InvalidRequest(f"{param}[{number}] is empty", param=f"{param}[{number}]")
            return "conversations"
        if kinds <= {int}:
            return "several ids"
    elif kinds == {str}:
        return "texts"
    elif kinds == {int}:
        return "ids"
    elif kinds == {Message}:
        return "conversation"
    raise InvalidRequest(
        f"{param} is a text, texts, token ids, lists of token ids, a conversation or conversations, not a mixture",
        param=param,
    )


def _text(text: str, where: str) -> Passage:
    require_text(text, where)
    return Passage((text,))


def _conversation(turns: Sequence[Message], request: InputFields, body_bytes: int) -> Conversation:
    variables = request.chat_template_kwargs
    return Conversation(
        messages=partial(template_messages, turns),
        body_bytes=body_bytes,
        add_generation_prompt=bool(request.add_generation_prompt),
        continued=final_text(turns) if request.continue_final_message else None,
        template_variables={} if variables is None else msgspec.to_builtins(variables),
    )
