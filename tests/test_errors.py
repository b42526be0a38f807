from __future__ import annotations

import msgspec
import pytest

from infd.errors import (
    AdapterTooLarge,
    AddressUnavailable,
    CheckpointError,
    DeviceLost,
    Fault,
    Foreign,
    InfdError,
    NothingAllowed,
    NotReady,
    PromptTooLong,
    RequestFailed,
    StepTooLarge,
)

ERRORS = [
    AdapterTooLarge(5, 3),
    AddressUnavailable("::1", 80, OSError(98, "Address already in use")),
    CheckpointError("config.json: missing"),
    DeviceLost("gone"),
    NothingAllowed(),
    NotReady("starting", "loading", 3),
    PromptTooLong(9, 8, param="prompt"),
    RequestFailed("not finite"),
    StepTooLarge("out of memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_behind_its_encoding(error: InfdError):
    sent = msgspec.msgpack.encode(Fault.of(error))
    back = msgspec.msgpack.decode(sent, type=Fault).error()

    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


def test_an_exception_that_infd_does_not_raise_on_purpose_keeps_its_type_and_words():
    back = Fault.of(KeyError("row")).error()

    assert isinstance(back, Foreign)
    assert not isinstance(back, InfdError)
    assert str(back) == "KeyError: 'row'"
