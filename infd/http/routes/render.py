"""POST /v1/chat/completions/render and /v1/completions/render: the prompts of such requests, without an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from infd.http import send
from infd.http.body import read
from infd.http.prompt import written
from infd.http.routes import chat, completions
from infd.http.schema.tokens import RenderedPrompt
from infd.http.service import SERVICE

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.prompt import Prompt
    from infd.http.served import ServedModel
    from infd.offload import Offload


async def chat_prompt(request: web.Request) -> web.StreamResponse:
    """One conversation."""
    service = request.app[SERVICE]
    said, size = await read(request, chat.DECODER)
    chat.check(said, service.config.limits)
    served = service.model()
    model = served.name(said.model)
    prompt = await chat.read_prompt(said, size, served, service.offload)
    return send.json(msgspec.json.encode(await _rendered(prompt, model, served, service.offload)))


async def completion_prompts(request: web.Request) -> web.StreamResponse:
    """One text, or several: a list either way."""
    service = request.app[SERVICE]
    said, _ = await read(request, completions.DECODER)
    written = completions.prompts_of(said)
    completions.check(said, len(written), service.config)
    served = service.model()
    model = served.name(said.model)
    prompts = await completions.read_prompts(said, written, served, service.offload)
    rendered = [await _rendered(prompt, model, served, service.offload) for prompt in prompts]
    return send.json(msgspec.json.encode(rendered))


async def _rendered(prompt: Prompt, model: str, served: ServedModel, offload: Offload) -> RenderedPrompt:
    text = await written(prompt, served, offload, skip_special_tokens=False)
    return RenderedPrompt(
        model=model, prompt=text, token_ids=list(prompt.ids), count=len(prompt.ids), max_model_len=served.max_model_len
    )
