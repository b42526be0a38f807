"""Describe the served model in the formats of other servers: GET /props (llama.cpp) and /tokenizer_info (vLLM)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from infd.engine.lifecycle.state import State
from infd.http import send
from infd.version import __version__

if TYPE_CHECKING:
    from aiohttp import web

    from infd.http.routing import Request


async def props(request: Request) -> web.StreamResponse:
    """Return the context length, sampling defaults, chat template and special tokens, named as in llama.cpp."""
    service = request.service
    served, capacity = service.model(), service.engine.core.capacity
    defaults = served.defaults
    settings = {
        "temperature": defaults.temperature,
        "top_k": defaults.top_k,
        "top_p": defaults.top_p,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
    }
    properties = {
        "default_generation_settings": {"n_ctx": served.max_model_len, "params": settings},
        "total_slots": capacity.rows,
        "model_alias": served.names[0],
        "model_path": served.names[0],
        "chat_template": served.template.source or "",
        "bos_token": served.tokenizer.bos or "",
        "eos_token": served.tokenizer.eos or "",
        "modalities": {"vision": False, "audio": False},
        "build_info": f"infd {__version__}",
        "is_sleeping": service.engine.lifecycle.state is State.SLEEPING,
    }
    return send.json(msgspec.json.encode(properties))


async def tokenizer_info(request: Request) -> web.StreamResponse:
    """Return tokenizer_config.json, with the chat template in use."""
    served = request.service.model()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **served.tokenizer.files.tokenizer_config}
    if (template := served.template.source) is not None:
        config["chat_template"] = template
    return send.json(msgspec.json.encode(config))
