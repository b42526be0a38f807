"""Rates of requests and tokens that a key or tenant may use, as token buckets.

Up to `quotas.burst_s` seconds' worth of a rate may be used at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from infd.errors import ConfigError, RateLimited

if TYPE_CHECKING:
    from infd.config import QuotasConfig

Unit = Literal["requests", "tokens"]

UNITS: Final[tuple[Unit, ...]] = ("requests", "tokens")
MINUTE_S: Final = 60.0
_SMOOTHING: Final = 1 / 8  # weight of the latest request in the usual amount
RATES: Final = ("requests_per_minute", "tokens_per_minute")


class Rates(Struct, frozen=True):
    """Limits of a key or a tenant; None: no limit of its own.

    share  the tenant's share of the device, relative to those of other tenants
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    share: float = 1.0


class Bucket:
    """A token bucket. It keeps the amount that is used and not yet refilled, so that limits may change between calls.

    usual  average of the amounts that requests needed; 0: no request was counted
    """

    __slots__ = ("_at", "_used", "usual")

    def __init__(self) -> None:
        self._used = 0.0
        self._at = -math.inf
        self.usual = 0.0

    def used(self, now: float, per_s: float) -> float:
        """Return the used amount at time `now`, in seconds."""
        if now > self._at:
            self._used = max(0.0, self._used - (now - self._at) * per_s)
            self._at = now
        return self._used

    def add(self, amount: float) -> None:
        """Use `amount`; a negative amount is returned to the bucket. Call `used` with the present time first."""
        self._used = max(0.0, self._used + amount)

    def needed(self, amount: float) -> None:
        """Update `usual` by the amount that one request needs, admitted or not."""
        self.usual += (amount - self.usual) * (_SMOOTHING if self.usual else 1.0)


class Standing(Struct, frozen=True):
    """The part of a limit that is left. `reset_s`: seconds until the whole limit is left."""

    unit: Unit
    limit: int
    remaining: int
    reset_s: float


class Limit(Struct, frozen=True):
    """One rate of a key or tenant.

    owner  for messages: "this key", "tenant 'x'"
    """

    unit: Unit
    owner: str
    per_minute: int
    burst_s: float
    bucket: Bucket

    @property
    def per_s(self) -> float:
        return self.per_minute / MINUTE_S

    @property
    def capacity(self) -> float:
        return max(1.0, self.per_s * self.burst_s)

    def require(self, amount: float | None, now: float) -> None:
        """Raise RateLimited if `amount`, or a full bucket if that is less, is not left.

        amount  None: not known yet. One must be left; Retry-After is the time until the usual amount is.
        """
        used = self.bucket.used(now, self.per_s)
        if used + min(amount or 1.0, self.capacity) - self.capacity > 1e-9:
            expected = max(1.0, self.bucket.usual) if amount is None else amount
            lacking = used + min(expected, self.capacity) - self.capacity
            left = self.standing(now).remaining
            needed = f"; this request may need {amount:.0f}" if self.unit == "tokens" and amount is not None else ""
            raise RateLimited(
                f"{self.owner} may use {self.per_minute} {self.unit} a minute, and {left} are left now{needed}",
                unit=self.unit,
                retry_after_s=math.ceil(lacking / self.per_s),
            )

    def standing(self, now: float) -> Standing:
        used = self.bucket.used(now, self.per_s)
        return Standing(self.unit, int(self.capacity), max(0, int(self.capacity - used)), used / self.per_s)


def tenants(quotas: QuotasConfig) -> dict[str, Rates]:
    """Read the options of each tenant. Raises ConfigError."""
    found: dict[str, Rates] = {}
    for tenant, text in quotas.tenants.items():
        try:
            found[tenant] = Rates(**dict(rate_option(option, share=True) for option in text.split()))  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"quotas.tenants.{tenant}: {error}") from None
    return found


def rate_option(text: str, *, share: bool = False) -> tuple[str, int | float]:
    """Read `requests_per_minute=N`, `tokens_per_minute=N` or, if permitted, `share=X`. Raises ValueError."""
    name, _, value = text.partition("=")
    if name in ("requests_per_minute", "tokens_per_minute") and value.isascii() and value.isdecimal() and int(value):
        return name, int(value)
    if name == "share" and share:
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if 0.001 <= number <= 1000:
            return name, number
    shares = ", `share=X` (0.001 to 1000)" if share else ""
    raise ValueError(
        f"{text!r} is no option; there are `requests_per_minute=N`, `tokens_per_minute=N` (1 or more){shares}"
    )
