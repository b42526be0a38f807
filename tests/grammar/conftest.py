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
    before = PRESENT.set(request.param)
    yield request.param
    PRESENT.reset(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip xgrammar's exhaustive tests outside of `make soak`: xgrammar compiles ten times slower."""
    if os.environ.get("INFD_SOAK") == "1" or NAMED is not None:
        return
    for item in items:
        callspec = getattr(item, "callspec", None)
        engine = None if callspec is None else callspec.params.get("engine")
        if engine == "xgrammar" and item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.skip(reason="make soak runs it"))
