"""API keys: identify the key of a request, and enforce the key's limits.

The server stores only hashes of keys. It compares the key of a request with every hash, in constant time, so that
response times do not reveal partial matches.
"""

from __future__ import annotations

from contextlib import contextmanager
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import ConfigError, InvalidRequest, Overloaded, Unauthorized
from infd.http.rates import RATES, Rates

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Key(Struct, frozen=True):
    """The API key of one client. Keys of one tenant share cached prefixes, stored responses and conversations.

    in_flight  maximum requests in flight; None: no cap
    priority   smallest (earliest) priority that requests with this key may set; None: any
    rates      requests and tokens a minute
    """

    name: str
    digest: bytes
    tenant: str
    in_flight: int | None = None
    priority: int | None = None
    rates: Rates = Rates()

    def priority_of(self, requested: int | None) -> int:
        """Return the priority of a request. Raises InvalidRequest below the key's smallest priority."""
        if requested is None:
            return max(0, self.priority or 0)
        if self.priority is not None and requested < self.priority:
            raise InvalidRequest(
                f"the earliest priority that this key may ask for is {self.priority}", param="priority"
            )
        return requested


class Keys:
    """All API keys of this server. If no key is configured, requests need no key."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._keys)

    @classmethod
    def of(cls, secret: str, name: str = "default") -> Keys:
        """Return a `Keys` with one key."""
        return cls([Key(name, sha256(secret.encode()).digest(), name)])

    @classmethod
    def parse(cls, text: str, origin: str) -> Keys:
        """Read lines `name:sha256-of-key[:tenant] [OPTION=N ...]`; skip blank lines and `#` comments.

        Options: in_flight, priority, requests_per_minute, tokens_per_minute. The tenant defaults to the key's name.
        Raises ConfigError, naming `origin` and the line.
        """
        keys: dict[str, Key] = {}
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            name, _, rest = line.partition(":")
            secret, *options = rest.split() or [""]
            hexadecimal, _, tenant = secret.partition(":")
            try:
                digest = bytes.fromhex(hexadecimal)
            except ValueError:
                digest = b""
            if not name or len(digest) != sha256().digest_size:
                raise ConfigError(
                    f"{origin}:{number}: expected `name:sha256-of-key[:tenant] [in_flight=N] [priority=N]"
                    " [requests_per_minute=N] [tokens_per_minute=N]`, the hash as the 64 hex digits that"
                    ' `printf %s "$key" | sha256sum` prints'
                )
            if name in keys:
                raise ConfigError(f"{origin}:{number}: a key named {name!r} was given before")
            try:
                limits = dict(_option(option) for option in options)
                rates = Rates(**{name: limits.pop(name) for name in RATES if name in limits})
            except ValueError as error:
                raise ConfigError(f"{origin}:{number}: {error}") from None
            keys[name] = Key(name, digest, tenant or name, rates=rates, **limits)
        if not keys:
            raise ConfigError(f"{origin}: holds no key, which would leave the server open")
        return cls(keys.values())

    def identify(self, authorization: str | None, api_key: str | None = None) -> Key | None:
        """Return the key in the Authorization header, else in X-Api-Key; None if the server has no keys.

        Raises Unauthorized for a missing or unknown key.
        """
        if not self._keys:
            return None
        if authorization is None and api_key is not None:
            authorization = f"Bearer {api_key}"
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise Unauthorized("an API key is required: send the header `Authorization: Bearer <key>`")
        digest = sha256(secret.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for key in self._keys:
            if compare_digest(key.digest, digest):
                found = key
        if found is None:
            raise Unauthorized("this API key is not known here")
        return found


class InFlight:
    """Counts the requests in flight of each key that has a cap."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    @contextmanager
    def hold(self, key: str, most: int) -> Iterator[None]:
        """Count one request of the key named `key` until the block ends. Raises Overloaded if it has `most`."""
        now = self._of.get(key, 0)
        if now >= most:
            raise Overloaded(f"this key has {now} requests in flight, of at most {most}", code="key_in_flight")
        self._of[key] = now + 1
        try:
            yield
        finally:
            self._of[key] -= 1
            if not self._of[key]:
                del self._of[key]


def _option(text: str) -> tuple[str, int]:
    """Read an option such as `in_flight=8` or `priority=-5`. Raises ValueError."""
    name, _, value = text.partition("=")
    least = {"in_flight": 1, "priority": -(2**31), **dict.fromkeys(RATES, 1)}.get(name)
    if least is None or not value.removeprefix("-").isdecimal() or int(value) < least:
        raise ValueError(
            f"{text!r} is no option; there are `in_flight=N`, `requests_per_minute=N`, `tokens_per_minute=N` (1 or"
            " more) and `priority=N`"
        )
    return name, int(value)
