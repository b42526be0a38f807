"""A stalled reader delays no writer, and its missed pieces are counted in their place."""

from __future__ import annotations

from threading import Event, Semaphore

from infd.telemetry.backlog import Backlog

PATIENCE_S = 30.0


class Reader:
    """Reads one piece per permit."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.asked = Event()
        self.leave = Semaphore(0)

    def write(self, piece: bytes) -> None:
        self.asked.set()
        self.leave.acquire()
        if piece == b"broken":
            raise BrokenPipeError
        self.taken.append(piece)


def backlog(reader: Reader, most_bytes: int = 100) -> Backlog:
    return Backlog(reader.write, lambda dropped: b"(%d lost)" % dropped, most_bytes)


def test_pieces_are_written_in_their_order() -> None:
    reader = Reader()
    log = backlog(reader)
    for piece in (b"1", b"2", b"3"):
        log.put(piece)
    reader.leave.release(3)

    assert log.wait(PATIENCE_S)
    assert reader.taken == [b"1", b"2", b"3"]


def test_pieces_dropped_for_a_stalled_reader_are_counted_in_their_place() -> None:
    reader = Reader()
    log = backlog(reader, most_bytes=4)
    log.put(b"1111")
    assert reader.asked.wait(PATIENCE_S)
    log.put(b"2")
    log.put(b"3")
    assert not log.wait(0)
    reader.leave.release(2)
    assert log.wait(PATIENCE_S)
    reader.leave.release(1)
    log.put(b"4")

    assert log.wait(PATIENCE_S)
    assert reader.taken == [b"1111", b"(2 lost)", b"4"]


def test_a_closed_reader_does_not_stop_the_thread() -> None:
    reader = Reader()
    log = backlog(reader)
    reader.leave.release(2)
    log.put(b"broken")
    log.put(b"after")

    assert log.wait(PATIENCE_S)
    assert reader.taken == [b"after"]
