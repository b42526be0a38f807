"""The type of request fields that infd recognizes but does not support yet."""

from __future__ import annotations

from msgspec import Raw

# Null and the values in a schema's NEUTRAL pass; other values are refused. Fields of this type that a schema lists in
# SUPPORTED are read nevertheless: their values are JSON text.
UnsupportedField = Raw
ABSENT = Raw(b"null")
