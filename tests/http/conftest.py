"""Tests of the endpoint run on the loop that the daemon runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import uvloop

from tests.http.endpoint import Endpoint, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
def event_loop_policy() -> uvloop.EventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with serving() as endpoint:
        yield endpoint
