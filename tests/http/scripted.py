"""An endpoint whose model generates given texts, one token per byte, under Qwen3's chat template."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from infd.text.chat import ChatTemplate
from infd.text.syntax import Syntax
from tests.fakes import FakeDevice, FakeExecutor, capacity
from tests.http.endpoint import serving
from tests.http.model import served, tokenizer
from tests.text.templates import TEMPLATES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from infd.config import Config
    from infd.grammar.protocol import Grammars
    from infd.scheduler.plan import Span
    from tests.http.endpoint import Endpoint

CONTEXT = 8192


class ScriptedDevice(FakeDevice):
    """Generates the answer of each choice, then the end id. A choice's seed is the index of its answer."""

    answers: tuple[str, ...] = ()

    def speak(self, span: Span, histories: list[list[int]]) -> int:
        said = len(self.tokens[span.row]) - self.prompts[span.row]
        ids = ids_of(self.answers[self.seeds[span.row]])
        return ids[said] if said < len(ids) else tokenizer().id_of("<|im_end|>") or 0


@cache
def ids_of(text: str) -> list[int]:
    """Return one token id for each byte, so that markers and characters are split between tokens."""
    single = {tokenizer().piece(token_id): token_id for token_id in range(3, 3 + 256)}
    return [single[bytes([byte])] for byte in text.encode()]


@asynccontextmanager
async def speaking(
    *answers: str,
    template: str = TEMPLATES["qwen3"],
    grammars: Grammars | None = None,
    config: Config | None = None,
) -> AsyncIterator[Endpoint]:
    """Run an endpoint whose choices generate `answers`, in order of index."""
    room = capacity(pages=8192, rows=16, step_tokens=1024, max_model_len=CONTEXT)
    executor = FakeExecutor(room)
    executor.device = ScriptedDevice(room)
    executor.device.answers = answers
    async with serving(config, executor=executor, grammars=grammars) as endpoint:
        chat = ChatTemplate({"default": template})
        endpoint.server.served = msgspec.structs.replace(
            served(CONTEXT), template=chat, syntax=Syntax.choose(tokenizer(), chat)
        )
        yield endpoint
