"""Run the endpoint's tests on uvloop, as the daemon does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import uvloop

from tests.http.endpoint import Endpoint, serving

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import AsyncIterator, Callable


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving() as endpoint:
        yield endpoint
