"""Check quantization_config. Errors name the key at fault."""

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
    """Return `table` as type `kind`. Raises CheckpointError if a value has the wrong type or is out of bounds."""
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise refusal(str(error).replace("`$", "`quantization_config")) from error


def refusal(reason: str) -> CheckpointError:
    """Return the error for a quantization_config that infd cannot read."""
    return CheckpointError(f"config.json: quantization_config: {reason}")


def required(table: Mapping[str, Any], absent: Mapping[str, str]) -> None:
    """Raise CheckpointError if `table` has a key of `absent`, which gives the reason for each key.

    Such keys change the meaning of the weights in ways that infd does not support.
    """
    for key, reason in absent.items():
        if table.get(key):
            raise refusal(f"{key}: {reason}")


def few(schemes: Collection[object]) -> None:
    """Raise CheckpointError if there are more than MOST_SCHEMES: each module may be compared with every scheme."""
    if len(schemes) > MOST_SCHEMES:
        raise refusal(f"{len(schemes)} schemes; at most {MOST_SCHEMES} are read")


def fitting(attempts: Iterable[Callable[[], E]]) -> E:
    """Return the first encoding that fits a module's tensors; if none fits, raise the first attempt's CheckpointError.

    attempts  each returns an encoding by one scheme, or raises CheckpointError if the tensors do not fit the scheme

    The dtypes and shapes of a module's tensors determine its scheme. The config's patterns of module names are not
    used: to match a checkpoint's regular expressions may take exponential time.
    """
    refused: CheckpointError | None = None
    for attempt in attempts:
        try:
            return attempt()
        except CheckpointError as error:
            refused = refused or error
    assert refused is not None
    raise refused
