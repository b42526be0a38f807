"""Decide which requests may share cached prefixes.

A prefix key begins with a root: a hash of the model, the adapter, the tenant,
the cache salt and an epoch. Requests with different roots share no pages.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infd.config import Config
    from infd.request import Adapter, Request


class PrefixRoots:
    """Makes the roots of this daemon's prefix keys."""

    def __init__(self, config: Config) -> None:
        self._model = config.model.path
        self._by_tenant = config.cache.isolation == "tenant"
        self._epoch = 0
        self._latest = ("", "", "", -1), b""  # the parts of the latest root, and this root

    def renew(self) -> None:
        """Start a new epoch: later requests share no page with earlier requests."""
        self._epoch += 1

    def of(self, request: Request, adapter: Adapter | None) -> bytes:
        tenant = request.tenant if self._by_tenant else ""
        adapter_id = "" if adapter is None else f"{adapter.name}/{adapter.generation}"
        parts = adapter_id, tenant, request.cache_salt, self._epoch
        latest, root = self._latest
        if parts != latest:
            hashed = "\0".join((self._model, *map(str, parts)))
            self._latest = parts, (root := blake2b(hashed.encode(), digest_size=16).digest())
        return root
