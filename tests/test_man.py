"""The man pages match commands and settings."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from infd.kernels.select import CACHED, CANDIDATES

DIRECTORY = Path(__file__).parent.parent / "man"
PAGES: dict[str, str] = runpy.run_path(str(DIRECTORY / "generate.py"))["pages"]()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_would_be_generated(name: str) -> None:
    assert (DIRECTORY / name).read_text(encoding="utf-8") == PAGES[name], "out of date: run `make man`"


def test_pages_name_every_command_and_setting() -> None:
    assert r".SS infd config show" in PAGES["infd.1"]
    assert r"\-\-kv\-cache\-bytes SIZE" in PAGES["infd.1"]
    assert r".SS infdctl drain" in PAGES["infdctl.1"]
    assert ".BI priority_patience" in PAGES["infd.toml.5"]


def test_a_page_says_what_each_kernel_computes_in() -> None:
    page = PAGES["infd.1"].replace("\\", "")
    for families in (CANDIDATES, *CACHED.values()):
        for some in families.values():
            assert all(f"{each.name}: " in page for each in some)
    assert "native: a CPU, bfloat16 and float32; triton: a GPU, any type; flashinfer: a GPU, bfloat16 and" in page
