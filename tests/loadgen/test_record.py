from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from infd.loadgen import record
from infd.loadgen.datasets.spec import File
from infd.loadgen.figures import Measured, summarise
from infd.loadgen.record import Record, Unreadable
from infd.loadgen.samples import Failure, Sample
from infd.loadgen.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path


def measured() -> Record:
    sample = Sample(ttft_s=0.5, e2e_s=1.0, gaps_s=[0.1234567], input_tokens=3, output_tokens=2, counted=True)
    failure = Failure(kind="timeout", due_s=1.0, e2e_s=2.0)
    settings = Settings(url="u", dataset=File(path="p", shape="mooncake"), objectives_ms={"ttft": 200.0})
    report = summarise(settings, "m", "now", Measured(duration_s=2.0, samples=[sample], failures=[failure]))
    return Record(label="x", metadata={"gpu": "none"}, runs=[report])


def test_a_measurement_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = measured()
    path = str(tmp_path / "a.json")
    record.write(path, written)
    read = record.read(path)

    assert read.runs[0].samples[0].gaps_s == [0.123457]
    assert record.encode(read) == record.encode(written)
    assert read.runs[0].settings == written.runs[0].settings


def test_a_file_that_is_no_measurement_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")

    with pytest.raises(Unreadable, match=r"a.json: not written by `infdctl bench --json`"):
        record.read(str(path))
    with pytest.raises(Unreadable, match=r"b.json: No such file"):
        record.read(str(tmp_path / "b.json"))


def test_a_failed_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        record.write(str(path), measured())

    assert os.listdir(tmp_path) == ["a.json"]
