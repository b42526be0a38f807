"""From encoded prompts to an answer: one request each, one reply per choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.errors import InvalidRequest
from infd.http import sampling
from infd.http.answer import Answer
from infd.request import Request
from infd.text.reply import Reply
from infd.text.stops import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.engine.ticket import Ticket
    from infd.http.schema.sampling import GenerationRequest
    from infd.http.served import ServedModel
    from infd.http.service import Exchange


async def submit(
    said: GenerationRequest,
    prompts: Sequence[tuple[int, ...]],
    served: ServedModel,
    ticket: Ticket,
    exchange: Exchange,
    *,
    prompt_param: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
) -> Answer:
    """Queue the prompts, and return the answer to read. Raises InvalidRequest, PromptTooLong, Overloaded."""
    end_ids = sampling.end_ids(said, served)
    requests = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest("the prompt is empty", param=prompt_param)
        requests.append(
            Request(
                id=ticket.id if len(prompts) == 1 else f"{ticket.id}-{number}",
                prompt=prompt,
                sampling=sampling.sampling_params(
                    said,
                    served,
                    max_tokens=sampling.max_tokens(
                        len(prompt), max_tokens, default_max_tokens, served, prompt_param=prompt_param
                    ),
                    logprobs=logprobs,
                ),
                choices=said.n or 1,
                end_ids=end_ids,
                priority=exchange.priority(said.priority),
                tenant=exchange.tenant,
                cache_salt=said.cache_salt or "",
            )
        )
    strings = sampling.stop_strings(said)
    stops = StopStrings(strings) if strings else None
    show_stop = bool(said.include_stop_str_in_output)
    replies = [
        Reply(
            served.tokenizer,
            stops,
            include_stop_str_in_output=show_stop,
            min_tokens=said.min_tokens or 0,
            skip_special_tokens=said.skip_special_tokens is not False,
        )
        for request in requests
        for _ in range(request.choices)
    ]
    choices = await ticket.submit(*requests, watchers=replies, client=exchange.client)
    return Answer(choices, replies, stop_ids=frozenset(said.stop_token_ids or ()), show_stop_id=show_stop)
