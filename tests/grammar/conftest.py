from __future__ import annotations

import os

import pytest

from tests.grammar.engines import NAMED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip xgrammar's exhaustive tests outside of `make soak`: xgrammar compiles ten times slower."""
    if os.environ.get("INFD_SOAK") == "1" or NAMED is not None:
        return
    for item in items:
        callspec = getattr(item, "callspec", None)
        engine = None if callspec is None else callspec.params.get("engine")
        if engine == "xgrammar" and item.get_closest_marker("exhaustive") is not None:
            item.add_marker(pytest.mark.skip(reason="make soak runs it"))
