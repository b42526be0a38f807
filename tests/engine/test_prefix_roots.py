"""The root of a prefix key names everything that a cached value depends on, and its owner."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Literal

import pytest

from infd.config import CacheConfig, Config, ModelConfig
from infd.engine.prefix_roots import PrefixRoots
from infd.request import Adapter, Request

if TYPE_CHECKING:
    from collections.abc import Iterator


def request(tenant: str = "", salt: str = "") -> Request:
    return Request(id="r", prompt=(1,), wants=(), tenant=tenant, cache_salt=salt)


def roots(model: str = "model", isolation: Literal["tenant", "none"] = "tenant") -> PrefixRoots:
    return PrefixRoots(Config(model=ModelConfig(path=model), cache=CacheConfig(isolation=isolation)))


def every() -> Iterator[bytes]:
    """Yield the roots of requests of which no two may share a page."""
    texts = ("", "a", "b", "ab", "a/1", "1")
    for model in ("a", "b", "ab"):
        made = roots(model)
        for _epoch in range(3):
            for tenant, salt in product(texts, texts):
                for adapter in (None, Adapter("a", 1), Adapter("a", 11), Adapter("a/1", 1)):
                    yield made.of(request(tenant, salt), adapter)
            made.renew()


def test_no_two_that_differ_in_anything_have_a_root_in_common():
    found = list(every())

    assert len(set(found)) == len(found) == 3 * 3 * 6 * 6 * 4


def test_a_salt_with_zeros_in_it_reaches_no_other_epoch_or_tenant():
    older, newer = roots(), roots()
    newer.renew()

    forged = [newer.of(request("eve", salt), None) for salt in ("\0", "\0000", "bob\0", "\0bob\0", "bob\0\0000")]

    assert older.of(request("eve"), None) not in forged
    assert older.of(request("bob"), None) not in forged
    assert newer.of(request("bob"), None) not in forged


@pytest.mark.parametrize(("isolation", "shared"), [("tenant", False), ("none", True)])
def test_tenants_share_only_where_the_settings_say_so_and_a_salt_always_narrows(isolation, shared: bool):
    made = roots(isolation=isolation)

    assert (made.of(request("a"), None) == made.of(request("b"), None)) is shared
    assert made.of(request("a", "mine"), None) != made.of(request("a"), None)
