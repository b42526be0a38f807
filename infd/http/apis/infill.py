"""llama.cpp's POST /infill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from infd.errors import InvalidRequest, Unsupported
from infd.http import sampling
from infd.http.apis.api import Api
from infd.http.constraints import constrained
from infd.http.formats.infill import InfillFormat
from infd.http.formats.openai import OPENAI_ERRORS
from infd.http.generation import Generation, Texts
from infd.http.schema.infill import InfillRequest
from infd.text.infill import File, Gap

if TYPE_CHECKING:
    from infd.config import Config


def generation(request: InfillRequest, body_bytes: int, config: Config) -> Generation:
    """Check a request and convert it to a Generation. Raises InvalidRequest, Unsupported."""
    sampling.check(request, config.limits)
    if (request.n or 1) > 1:
        raise InvalidRequest("/infill gives one answer", param="n")
    if request.prompt_logprobs is not None:
        raise Unsupported("prompt_logprobs of /infill", param="prompt_logprobs")
    if request.return_routed_experts:
        raise Unsupported("return_routed_experts of /infill", param="return_routed_experts")
    files = tuple(File(file.filename, file.text) for file in request.input_extra or ())
    gap = Gap(request.input_prefix, request.input_suffix, request.prompt or "", files, "input_suffix")
    return Generation(
        fields=request,
        input=Texts([gap]),
        prompt_param="input_prefix",
        body_bytes=body_bytes,
        max_tokens=request.max_tokens,
        constrained=constrained(request),
        stop_strings=sampling.stop_strings(request),
    )


INFILL: Final = Api(msgspec.json.Decoder(InfillRequest), generation, InfillFormat, OPENAI_ERRORS)
