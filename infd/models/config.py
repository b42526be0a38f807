"""Read config.json with care: every value is checked for type and range, and a bad one is named.

Files on the hub and files written by transformers 5 spell some settings
differently; both spellings are understood here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST = 2**24  # above every real dimension, below what would exhaust memory before a tensor is looked at


class Settings:
    """A table of config.json, `path` naming it in messages."""

    def __init__(self, table: Mapping[str, Any], path: str = "") -> None:
        self._table = table
        self._path = path

    def __contains__(self, key: str) -> bool:
        """Say whether the key is there with a value; null counts as absent, as transformers writes it."""
        return self._table.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, f"an integer between {least} and {most}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(key, "a positive number", value)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false", value)
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if type(value) is not str:
            raise self.error(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) is str for item in value):
            raise self.error(key, "a list of strings", value)
        return value

    def table(self, key: str) -> Settings:
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return Settings(value, f"{self._path}{key}.")

    def error(self, key: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"config.json: {self._path}{key}: expected {expected}, found {found!r}")

    def _get(self, key: str, default: object) -> Any:
        value = self._table.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: {self._path}{key} is missing")
        return value


def architecture(config: Mapping[str, Any]) -> str:
    """Return the name of the model's class, as transformers calls it."""
    names = Settings(config).strings("architectures")
    if not names:
        raise CheckpointError("config.json: architectures is empty")
    return names[0]


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the type that the weights were trained in, such as "bfloat16", or None where config.json does not say."""
    settings = Settings(config)
    for key in ("dtype", "torch_dtype"):
        if key in settings:
            return settings.string(key).removeprefix("torch.")
    return None


def context_length(config: Mapping[str, Any]) -> int:
    """Return the longest sequence, in tokens, that the model was made for."""
    return Settings(config).integer("max_position_embeddings")
