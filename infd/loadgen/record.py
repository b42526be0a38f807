"""The file of a measurement: every run with its settings, figures and requests."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct, structs

from infd.files import replace
from infd.loadgen.figures import Report
from infd.loadgen.samples import Sample
from infd.version import __version__


class Record(Struct, frozen=True, kw_only=True):
    """A measurement of one run or of a sweep.

    label     a name for people, such as the server's version; "": none
    metadata  the user's notes
    """

    format: Literal["infd-bench/1"] = "infd-bench/1"
    version: str = __version__
    label: str = ""
    metadata: dict[str, str] = {}
    runs: list[Report]


class Unreadable(Exception):
    """A file is not a record; the message names the file."""


def encode(record: Record) -> bytes:
    """Return the record as JSON, with times in whole microseconds."""
    runs = [structs.replace(run, samples=[_rounded(sample) for sample in run.samples]) for run in record.runs]
    return msgspec.json.encode(structs.replace(record, runs=runs)) + b"\n"


def write(path: str, record: Record) -> None:
    """Write the record's file. Raises OSError."""
    replace(path, encode(record))


def read(path: str) -> Record:
    """Read a record. Raises Unreadable."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Record)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path}: not written by `infdctl bench --json`: {error}") from None


def _rounded(sample: Sample) -> Sample:
    times = {name: round(getattr(sample, name), 6) for name in ("ttft_s", "e2e_s", "due_s", "queued_s")}
    return structs.replace(sample, gaps_s=[round(gap, 6) for gap in sample.gaps_s], **times)
