from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import pytest

from tests.grammar.engines import ENGINES, NAMED, PRESENT

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the engine with which the module's tests run."""
    if NAMED is not None and request.param != NAMED:
        pytest.skip(f"INFD_TEST_GRAMMAR_ENGINE is {NAMED}")
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    exhaustive = request.node.get_closest_marker("exhaustive") is not None
    if request.param == "xgrammar" and exhaustive and os.environ.get("INFD_SOAK") != "1" and NAMED is None:
        pytest.skip("xgrammar compiles ten times slower: make soak")
    before = PRESENT.set(request.param)
    yield request.param
    PRESENT.reset(before)
