"""Parts that verbs share: media types, refusals, the version, durations."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, le=1e9)]
ANSWER_TYPE = "application/json"
PROBLEM_TYPE = "application/problem+json"
FEED_TYPE = "application/x-ndjson"


class Problem(Struct, omit_defaults=False):
    """A refusal as an RFC 9457 problem document. `detail` names the remedy; `code` is for programs."""

    title: str
    status: int
    detail: str
    code: str
    type: str = "about:blank"


class NoArguments(Struct, forbid_unknown_fields=True):
    """No arguments; unknown fields are refused."""


class Version(Struct):
    version: str
    api: tuple[str, ...] = ("v1",)
