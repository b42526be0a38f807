"""Findings, initial inputs and damaged copies of both, on every run of the suite."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from tests.fuzz import targets
from tests.fuzz.targets import TARGETS, examples
from tests.fuzz.wire import statuses

SEEDS = Path(__file__).parent / "seeds"


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with a few changed, dropped or doubled."""
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


def test_the_admin_target_hears_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "SILENCE_S", 20)  # reached only by a failing test
    with closing(targets.AdminTarget()) as target:
        for data in examples("admin")[-2:]:
            answer = target.answer(data)
            assert answer.count(b"HTTP/1.1 ") == data.count(b" HTTP/1.1\r\n") + 1


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
            [200, 404],
        ),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            [200],
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", [200, 200]),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\ndata", [200]),
    ],
)
def test_answers_are_taken_apart(said: bytes, found: list[int]) -> None:
    assert statuses(said, cut_off=False) == found


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent",
    ],
)
def test_an_answer_that_is_none_is_noticed(said: bytes) -> None:
    with pytest.raises(AssertionError):
        statuses(said, cut_off=False)


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_input_breaks_a_target(name: str) -> None:
    target = TARGETS[name]()
    chance = random.Random(7)
    known = examples(name) + [path.read_bytes() for path in sorted((SEEDS / name).glob("*"))]
    with closing(target):
        for data in known:
            target(data)
        for _ in range(target.noise):
            target(damaged(chance.choice(known), chance))
