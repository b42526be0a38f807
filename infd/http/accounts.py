"""Limit the rates of API keys and tenants, and count the usage of each key.

A request takes one of its rate of requests (rates.py) before its body is read. Before it is queued it reserves its
prompt and max_tokens of the rate of tokens; when it ends, the unused part is returned. A request larger than the bucket
is admitted only at a full bucket, and overdraws it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct, field

from infd.errors import RateLimited
from infd.http.rates import Bucket, Limit, Rates, tenants
from infd.request import ANYONE, Tenant
from infd.telemetry.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from infd.config import LiveConfig, QuotasConfig
    from infd.engine.admission.ticket import Ticket
    from infd.http.auth import Key
    from infd.http.rates import Standing, Unit
    from infd.telemetry.metrics import Metrics


class Account(Struct):
    """The limits and the usage of a request's key.

    tenant    of the key
    reserved  tokens reserved and not settled
    """

    name: str = ""
    tenant: Tenant = ANYONE
    limits: tuple[Limit, ...] = ()
    usage: Usage = field(default_factory=Usage)
    clock: Callable[[], float] = time.monotonic
    reserved: float = 0.0
    entered: bool = False

    def enter(self) -> None:
        """Count a request, and take one of the rate of requests. Raises RateLimited, also if no token is left."""
        self.usage.requests += 1
        self.entered = True
        if not self.limits:
            return
        self._require(requests=1.0, tokens=None)
        for limit in self.limits:
            if limit.unit == "requests":
                limit.bucket.add(1.0)

    def reserve(self, tokens: int) -> None:
        """Take `tokens` of the rate of tokens until `settle`. Raises RateLimited."""
        if not self.limits:
            return
        for limit in self.limits:
            if limit.unit == "tokens":
                limit.bucket.needed(tokens)
        self._require(tokens=float(tokens))
        self._add(tokens)
        self.reserved += tokens

    def settle(self, ticket: Ticket) -> None:
        """Count the tokens of an ended request, and return the unused part of its reservation."""
        prompt, generated = ticket.prompt_tokens, ticket.generated_tokens
        if self.limits:
            now = self.clock()
            for limit in self.limits:
                limit.bucket.used(now, limit.per_s)
            self._add(prompt + generated - self.reserved if self.reserved else 0.0)
            self.reserved = 0.0
        if ticket.choices:
            self.usage.answered += 1
            self.usage.prompt += prompt
            self.usage.cached += ticket.cached_tokens
            self.usage.generated += generated

    def standings(self) -> list[Standing]:
        """Return the rest of the tightest limit of each unit; empty if the request was not counted."""
        if not (self.entered and self.limits):
            return []
        now = self.clock()
        tightest: dict[Unit, Standing] = {}
        for standing in (limit.standing(now) for limit in self.limits):
            if standing.unit not in tightest or standing.remaining < tightest[standing.unit].remaining:
                tightest[standing.unit] = standing
        return list(tightest.values())

    def _require(self, **amounts: float | None) -> None:
        now = self.clock()
        try:
            for limit in self.limits:
                if limit.unit in amounts:
                    limit.require(amounts[limit.unit], now)
        except RateLimited:
            self.usage.limited += 1
            raise

    def _add(self, tokens: float) -> None:
        for limit in self.limits:
            if limit.unit == "tokens":
                limit.bucket.add(tokens)


class Accounts:
    """The accounts of all keys, by the settings in force."""

    def __init__(self, live: LiveConfig, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._metrics = metrics
        self._clock = clock
        self._buckets: dict[tuple[str, str, Unit], Bucket] = {}  # by kind and name of the owner
        self._read: QuotasConfig | None = None
        self._tenants: Mapping[str, Rates] = {}
        self._terms: dict[Key | None, tuple[Tenant, tuple[Limit, ...]]] = {}  # under the settings read last

    def of(self, key: Key | None) -> Account:
        """Return the account that a request with this key uses; None: the server has no keys."""
        quotas = self._live.now.quotas
        if quotas is not self._read:
            self._read, self._tenants = quotas, tenants(quotas)
            self._terms.clear()
        terms = self._terms.get(key)
        if terms is None:
            terms = self._terms[key] = self._terms_of(key, quotas)
        tenant, limits = terms
        name = "" if key is None else key.name
        usage = self._metrics.usage.get(name)
        if usage is None:
            usage = self._metrics.usage[name] = Usage()
        usage.tenant = tenant.name  # the tenant now: a reload may have moved the key
        return Account(name, tenant, limits, usage, self._clock)

    def _terms_of(self, key: Key | None, quotas: QuotasConfig) -> tuple[Tenant, tuple[Limit, ...]]:
        """Return a key's tenant and limits."""
        name, tenant = ("", "") if key is None else (key.name, key.tenant)
        own, shared = Rates() if key is None else key.rates, self._tenants.get(tenant, Rates())
        rates: tuple[tuple[Unit, str, str, int | None], ...] = (
            ("requests", "key", name, own.requests_per_minute or quotas.requests_per_minute),
            ("tokens", "key", name, own.tokens_per_minute or quotas.tokens_per_minute),
            ("requests", "tenant", tenant, shared.requests_per_minute),
            ("tokens", "tenant", tenant, shared.tokens_per_minute),
        )
        limits = tuple(
            Limit(
                unit,
                "this key" if kind == "key" else f"the tenant {owner!r}",
                per_minute,
                quotas.burst_s,
                self._buckets.setdefault((kind, owner, unit), Bucket()),
            )
            for unit, kind, owner, per_minute in rates
            if per_minute is not None
        )
        return Tenant(tenant, shared.share), limits

    def keep_only(self, keys: Iterable[Key]) -> None:
        """Forget keys and tenants that are no longer configured, so that series and buckets are bounded."""
        self._terms.clear()
        names, owners = {""}, {("key", ""), ("tenant", "")}
        for key in keys:
            names.add(key.name)
            owners |= {("key", key.name), ("tenant", key.tenant)}
        for name in self._metrics.usage.keys() - names:
            del self._metrics.usage[name]
        for bucket in [bucket for bucket in self._buckets if bucket[:2] not in owners]:
            del self._buckets[bucket]
