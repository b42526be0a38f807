"""Decide who is asking.

Only hashes of keys are kept, and every one of them is compared for every
request, so that the time taken says nothing about which came close.
"""

from __future__ import annotations

from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING

from msgspec import Struct

from infd.errors import ConfigError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterable


class Key(Struct, frozen=True):
    """One client. Cached prefixes are shared within its tenant."""

    name: str
    digest: bytes
    tenant: str


class Keys:
    """All keys that open this server; none at all means that it is open."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def of(cls, secret: str, name: str = "default") -> Keys:
        """Return one key, from the secret itself."""
        return cls([Key(name, sha256(secret.encode()).digest(), name)])

    @classmethod
    def parse(cls, text: str, origin: str) -> Keys:
        """Read lines `name:sha256-of-key[:tenant]`; blank lines and `#` comments are skipped.

        The tenant is the key's name unless declared. Raises ConfigError, naming `origin` and the line.
        """
        keys: dict[str, Key] = {}
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            name, _, rest = line.partition(":")
            hexadecimal, _, tenant = rest.partition(":")
            try:
                digest = bytes.fromhex(hexadecimal)
            except ValueError:
                digest = b""
            if not name or len(digest) != sha256().digest_size:
                raise ConfigError(
                    f"{origin}:{number}: expected `name:sha256-of-key[:tenant]`, the hash as 64 hex digits"
                )
            if name in keys:
                raise ConfigError(f"{origin}:{number}: a key named {name!r} was given before")
            keys[name] = Key(name, digest, tenant or name)
        if not keys:
            raise ConfigError(f"{origin}: holds no key, which would leave the server open")
        return cls(keys.values())

    def identify(self, authorization: str | None) -> Key | None:
        """Return whose key an Authorization header carries, or None when no key is asked for.

        Raises Unauthorized.
        """
        if not self._keys:
            return None
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
