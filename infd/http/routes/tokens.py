"""POST /tokenize and /detokenize."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest
from infd.http import send
from infd.http.body import read
from infd.http.conversation import final_text, template_messages, template_tools, tool_specs
from infd.http.generation import Conversation
from infd.http.prompt import SHORT_CHARACTERS, check_length, decode, encode, render
from infd.http.sampling import check_ids, refuse_unsupported
from infd.http.schema.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.routing import Request

TOKENIZE: Final = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: Request) -> web.StreamResponse:
    """Return the token ids of a text, or of a conversation rendered by the chat template."""
    service = request.service
    body, size = await read(request, TOKENIZE)
    refuse_unsupported(body, body.NEUTRAL)
    served = service.model()
    served.name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.messages is not None:
        variables = body.chat_template_kwargs
        conversation = Conversation(
            messages=partial(template_messages, body.messages),
            body_bytes=size,
            tools=partial(template_tools, tool_specs(body.tools)) if body.tools else None,
            add_generation_prompt=body.add_generation_prompt,
            continued=final_text(body.messages) if body.continue_final_message else None,
            template_variables={} if variables is None else msgspec.to_builtins(variables),
        )
        special = body.add_special_tokens
        prompt = await render(conversation, served, service.offload, add_special_tokens=special, must_fit=False)
        ids = prompt.ids
    else:
        check_length(body.prompt or "", served, param="prompt", must_fit=False)
        special = body.add_special_tokens is not False
        ids = await encode(body.prompt or "", served, service.offload, add_special_tokens=special)

    def encoded() -> bytes:
        strings = [served.tokenizer.token(token_id) for token_id in ids] if body.return_token_strs else None
        return msgspec.json.encode(
            TokenizeResponse(count=len(ids), max_model_len=served.max_model_len, tokens=list(ids), token_strs=strings)
        )

    return send.json(encoded() if len(ids) <= SHORT_CHARACTERS else await service.offload(encoded))


async def detokenize(request: Request) -> web.StreamResponse:
    """Return the text of token ids, special tokens included."""
    service = request.service
    body, _ = await read(request, DETOKENIZE)
    served = service.model()
    served.name(body.model)
    check_ids(body.tokens, served, "tokens")
    text = await decode(body.tokens, served, service.offload, skip_special_tokens=False)
    return send.json(msgspec.json.encode(DetokenizeResponse(prompt=text)))
