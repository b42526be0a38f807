"""From what a client wrote to token ids: render the conversation, encode the text."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.errors import InvalidRequest, PromptTooLong, Unsupported
from infd.http.sampling import refuse_not_built
from infd.text.chat import TooCostly
from infd.text.sandbox import BRIEF

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from infd.http.schema.chat import Message, TemplateKwargs
    from infd.http.served import ServedModel
    from infd.offload import Offload
    from infd.text.sandbox import Limits

# About 4 ms of encoding: longer texts would hold up every stream's tokens.
SHORT_CHARACTERS: Final = 4096


def check_length(text: str, served: ServedModel, *, param: str) -> None:
    """Refuse, before it is encoded, a text that is certainly too long: encoding 16 MiB takes seconds.

    Raises PromptTooLong.
    """
    least, limit = served.tokenizer.least_tokens(text), served.max_model_len - 1
    if least > limit:
        raise PromptTooLong(least, limit, at_least=True, param=param)


async def encode(text: str, served: ServedModel, offload: Offload, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Return the ids of a text."""
    if len(text) <= SHORT_CHARACTERS:
        return _encode(text, served, add_special_tokens=add_special_tokens)
    return await offload(_encode, text, served, add_special_tokens=add_special_tokens)


async def render(
    turns: list[dict[str, Any]],
    served: ServedModel,
    offload: Offload,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: TemplateKwargs | None,
    add_special_tokens: bool | None,
    must_fit: bool,
) -> tuple[int, ...]:
    """Return the ids of a conversation, as the model's chat template writes it.

    A template writes its own special tokens, so none are added unless asked for.
    Raises InvalidRequest; where it must fit, PromptTooLong for a text that is certainly too long.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )

    def work(limits: Limits | None = None) -> tuple[int, ...]:
        text = served.template.render(
            turns,
            add_generation_prompt=not continue_final_message
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=bool(continue_final_message),
            kwargs=None if kwargs is None else msgspec.to_builtins(kwargs),
            limits=limits,
        )
        if must_fit:
            check_length(text, served, param="messages")
        special = bool(add_special_tokens) and not served.template.begins_with_bos(text)
        return _encode(text, served, add_special_tokens=special)

    if _characters(turns) <= SHORT_CHARACTERS:
        # The template is a stranger's: it gets a few milliseconds of the loop, and its full time on a thread.
        with suppress(TooCostly):
            return work(BRIEF)
    return await offload(work)


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as templates read them. Raises InvalidRequest, Unsupported, naming the message."""
    return [_turn(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _turn(message: Message, at: str) -> dict[str, Any]:
    refuse_not_built(message, message.NEUTRAL, at=f"{at}.")
    if message.role in ("tool", "function"):
        raise Unsupported(f"the role {message.role!r}", param=f"{at}.role")
    # Open models were taught one name for both.
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    if message.content is None:
        raise InvalidRequest("content is required", param=f"{at}.content")
    if isinstance(message.content, str):
        turn["content"] = message.content
    else:
        texts = []
        for number, part in enumerate(message.content):
            where = f"{at}.content[{number}]"
            if part.type != "text":
                raise Unsupported(f"content of type {part.type!r}", param=f"{where}.type")
            if part.text is None:
                raise InvalidRequest("a part of type 'text' has a text", param=f"{where}.text")
            texts.append({"type": "text", "text": part.text})
        turn["content"] = texts
    if message.name is not None:
        turn["name"] = message.name
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        turn["reasoning_content"] = reasoning
    return turn


def _encode(text: str, served: ServedModel, *, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(served.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _characters(turns: list[dict[str, Any]]) -> int:
    return sum(len(text) for turn in turns for text in _texts(turn))


def _texts(turn: dict[str, Any]) -> Iterator[str]:
    for value in turn.values():
        if isinstance(value, str):
            yield value
        else:
            yield from (part["text"] for part in value)
