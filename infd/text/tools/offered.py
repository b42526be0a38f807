"""The tools offered in one request: their names, and the schemas of their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping


class Offered:
    """Tools by name. All choices of a request share one object.

    A schema is decoded only when a parser first asks for it. Answers without calls, and syntaxes whose values need no
    types, decode none.
    """

    __slots__ = ("_decoded", "_schemas")

    def __init__(self, schemas: Mapping[str, bytes]) -> None:
        """schemas: JSON text of each tool's parameters, by name; empty for a tool without a schema."""
        self._schemas = schemas
        self._decoded: dict[str, dict[str, Any]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def parameters(self, name: str) -> dict[str, Any]:
        """Return the schema of a tool's arguments; empty for a tool that was not offered or lacks a schema."""
        if name not in self._decoded:
            self._decoded[name] = _decode(self._schemas.get(name, b""))
        return self._decoded[name]


def _decode(schema: bytes) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(schema or b"{}")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}  # malformed schemas are refused earlier, when the prompt is rendered
    return decoded if isinstance(decoded, dict) else {}
