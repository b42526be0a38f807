"""The man pages match commands and settings."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infd.http.openapi.operations import OPERATIONS
from infd.kernels.select import CACHED, CANDIDATES
from infd.telemetry.exposition import expose
from infd.telemetry.metrics import Metrics

DIRECTORY = Path(__file__).parent.parent / "man"
sys.path.insert(0, str(DIRECTORY))
PAGES: dict[str, str] = runpy.run_path(str(DIRECTORY / "generate.py"))["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    assert (DIRECTORY / name).read_text(encoding="utf-8") == PAGES[name], "out of date: run `make man`"


def test_pages_name_every_command_and_setting() -> None:
    assert r".SS infd config show" in PAGES["infd.1"]
    assert r"\-\-kv\-cache\-bytes, \-\-kv\-cache\-memory\-bytes SIZE" in PAGES["infd.1"]
    assert r".SS infdctl drain" in PAGES["infdctl.1"]
    assert ".BI priority_patience" in PAGES["infd.toml.5"]


def test_the_man_page_names_device_and_types_of_each_kernel() -> None:
    page = PAGES["infd.1"].replace("\\", "")
    for families in (CANDIDATES, *CACHED.values()):
        for some in families.values():
            assert all(f"{each.name}: " in page for each in some)
    assert "native: a CPU, bfloat16 and float32; triton: a GPU, any type; flashinfer: a GPU, bfloat16 and" in page


def test_a_page_lists_every_endpoint() -> None:
    for operation in OPERATIONS:
        assert f".B {operation.method.upper()} {operation.path}\n" in PAGES["infd-http.7"].replace("\\", "")


def test_a_page_lists_every_metric_with_its_type_and_labels() -> None:
    page = PAGES["infd-metrics.7"]
    for metric in text_string_to_metric_families(expose(Metrics("m")).decode()):
        assert f".B {metric.name}" in page

    assert (
        "infd_requests_terminal_total\nCounter. How accepted requests ended. Labels: model_name, reason (abort, "
        in page
    )
    assert (
        "infd_http_requests_total\nCounter. HTTP requests answered, health probes and scrapes aside. Labels: h" in page
    )
    assert "vllm:lora_requests_info\nGauge." in page


@pytest.mark.parametrize("name", PAGES)
def test_pages_name_only_pages_that_exist(name: str) -> None:
    references = PAGES[name].replace("\\", "").partition(".SH SEE ALSO\n")[2].replace(",", "").splitlines()

    assert references
    for reference in references:
        _, other, section = reference.split()
        assert f"{other}.{section.strip('()')}" in PAGES
