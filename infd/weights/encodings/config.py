"""Read quantization_config: types are checked, and errors name the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

MOST_SCHEMES = 64
T = TypeVar("T")
E = TypeVar("E")


def convert(table: Any, kind: type[T]) -> T:
    """Return `table` as a `kind`. Raises CheckpointError."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error).replace("`$", "`quantization_config")) from error


def refusal(reason: str) -> CheckpointError:
    """Return the error for a quantization_config that infd cannot read."""
    return CheckpointError(f"config.json: quantization_config: {reason}")


def required(table: Mapping[str, Any], absent: Mapping[str, str]) -> None:
    """Refuse keys that change what the weights mean, and that infd does not read. absent: reason by key."""
    for key, reason in absent.items():
        if table.get(key):
            raise refusal(f"{key}: {reason}")


def few(schemes: Collection[object]) -> None:
    """Refuse more schemes than any writer needs, since each module is compared with each."""
    if len(schemes) > MOST_SCHEMES:
        raise refusal(f"{len(schemes)} schemes; at most {MOST_SCHEMES} are read")


def fitting(attempts: Iterable[Callable[[], E]]) -> E:
    """Return the first encoding that the stored tensors fit. Raises the first attempt's CheckpointError if none does.

    Which scheme a module has is decided by its tensors, whose dtypes and shapes differ by scheme, not by the config's
    patterns of module names: regular expressions of a checkpoint may take exponential time.
    """
    refused: CheckpointError | None = None
    for attempt in attempts:
        try:
            return attempt()
        except CheckpointError as error:
            refused = refused or error
    assert refused is not None
    raise refused
