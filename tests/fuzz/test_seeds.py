"""What fuzzing has found, what it begins with, and some noise around that, on every run of the suite."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from tests.fuzz import targets
from tests.fuzz.targets import TARGETS, SocketTarget, examples

SEEDS = Path(__file__).parent / "seeds"


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with a few of them changed, dropped or doubled."""
    result = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(result) + 1)
        match chance.randrange(4):
            case 0:
                result[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del result[at : at + chance.randint(1, 8)]
            case 2:
                result[at:at] = result[at : at + chance.randint(1, 30)]
            case 3:
                result[at:at] = chance.choice([b'"', b"[", b"{", b"-1", b"1e999", b"\r\n", b"\xff", b"null", b"\0"])
    return bytes(result)


@pytest.mark.parametrize("name", ["http", "admin"])
def test_a_target_hears_the_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SILENCE_S", 20)  # only ever reached by a failure
    with closing(TARGETS[name]()) as target:
        assert isinstance(target, SocketTarget)
        for data in examples(name)[-2:]:
            answer = target._runner.run(target._ask(data))
            assert answer.count(b"HTTP/1.1 ") == data.count(b" HTTP/1.1\r\n") + 1


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_input_breaks_a_target(name: str) -> None:
    target = TARGETS[name]()
    chance = random.Random(7)
    known = examples(name) + [path.read_bytes() for path in sorted((SEEDS / name).glob("*"))]
    with closing(target):
        for data in known:
            target(data)
        for _ in range(60 if isinstance(target, SocketTarget) else 600):
            target(damaged(chance.choice(known), chance))
