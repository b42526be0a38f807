"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest
from infd.http import send
from infd.http.body import read
from infd.http.formats.base import readable
from infd.http.prompt import SHORT_CHARACTERS, check_length, decode, encode, render
from infd.http.sampling import check_ids
from infd.http.schema.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from infd.http.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web

TOKENIZE: Final = msgspec.json.Decoder(TokenizeRequest)
DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.StreamResponse:
    """The ids of a text, or of a conversation as the template writes it."""
    service = request.app[SERVICE]
    said, size = await read(request, TOKENIZE)
    served = service.model()
    served.name(said.model)
    if (said.prompt is None) == (said.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if said.messages is not None:
        prompt = await render(
            said.messages,
            size,
            served,
            service.offload,
            tools=said.tools,
            add_generation_prompt=said.add_generation_prompt,
            continue_final_message=said.continue_final_message,
            kwargs=None if said.chat_template_kwargs is None else msgspec.to_builtins(said.chat_template_kwargs),
            add_special_tokens=said.add_special_tokens,
            must_fit=False,
        )
        ids = prompt.ids
    else:
        check_length(said.prompt or "", served, param="prompt", must_fit=False)
        special = said.add_special_tokens is not False
        ids = await encode(said.prompt or "", served, service.offload, add_special_tokens=special)

    def written() -> bytes:
        piece, strings = served.tokenizer.piece, None
        if said.return_token_strs:
            strings = [readable(piece(token_id)) for token_id in ids]
        return msgspec.json.encode(
            TokenizeResponse(count=len(ids), max_model_len=served.max_model_len, tokens=list(ids), token_strs=strings)
        )

    return send.json(written() if len(ids) <= SHORT_CHARACTERS else await service.offload(written))


async def detokenize(request: web.Request) -> web.StreamResponse:
    """The text of ids, special tokens included."""
    service = request.app[SERVICE]
    said, _ = await read(request, DETOKENIZE)
    served = service.model()
    served.name(said.model)
    check_ids(said.tokens, served, "tokens")
    text = await decode(said.tokens, served, service.offload, skip_special_tokens=False)
    return send.json(msgspec.json.encode(DetokenizeResponse(prompt=text)))
