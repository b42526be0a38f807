"""The type of request fields that infd recognizes but does not support yet."""

from __future__ import annotations

from msgspec import Raw

# Null and the values in a schema's NEUTRAL are accepted; other values are refused. A schema's SUPPORTED lists the
# fields of this type that are supported nevertheless: their values are read as JSON text.
UnsupportedField = Raw
ABSENT = Raw(b"null")
