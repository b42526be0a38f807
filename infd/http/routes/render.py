"""POST /v1/chat/completions/render and /v1/completions/render: return a request's prompts, and generate nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from infd.http import send
from infd.http.body import read
from infd.http.generation import Conversation
from infd.http.prompt import read_prompts, text_of
from infd.http.schema.sampling import GenerationFields
from infd.http.schema.tokens import RenderedPrompt

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.apis.api import Api
    from infd.http.prompt import Prompt
    from infd.http.routing import Handler, Request
    from infd.http.served_model import ServedModel
    from infd.offload import Offload

Fields = TypeVar("Fields", bound=GenerationFields)


def rendering(api: Api[Fields]) -> Handler:
    """Return a handler whose response is the prompt of a conversation, or a list of the prompts of texts."""

    async def render(request: Request) -> web.StreamResponse:
        service = request.service
        body, size = await read(request, api.decoder)
        generation = api.generation(body, size, service.config)
        served = service.model()
        model = served.name(body.model)
        prompts = await read_prompts(generation, served, service.offload)
        rendered = [await _rendered(prompt, model, served, service.offload) for prompt in prompts]
        one = isinstance(generation.input, Conversation)
        return send.json(msgspec.json.encode(rendered[0] if one else rendered))

    return render


async def _rendered(prompt: Prompt, model: str, served: ServedModel, offload: Offload) -> RenderedPrompt:
    text = await text_of(prompt, served, offload, skip_special_tokens=False)
    return RenderedPrompt(
        model=model, prompt=text, token_ids=list(prompt.ids), count=len(prompt.ids), max_model_len=served.max_model_len
    )
