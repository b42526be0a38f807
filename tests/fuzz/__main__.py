"""Fuzz one target for a while: `python -m tests.fuzz TARGET [--seconds N] [--corpus DIR]`."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

import atheris

SEEDS = Path(__file__).parent / "seeds"


def main() -> None:
    # Modules imported in this block are instrumented for coverage.
    with atheris.instrument_imports(include=["infd", "tests", "aiohttp"]):
        from tests.fuzz.targets import TARGETS, examples

    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="keep what is found here (default: a temporary directory)")
    chosen = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # no output, but targets may add handlers
    corpus = chosen.corpus or Path(tempfile.mkdtemp(prefix="infd-corpus-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for number, example in enumerate(examples(chosen.target)):
        (corpus / f"example-{number}").write_bytes(example)
    seeds = SEEDS / chosen.target
    seeds.mkdir(parents=True, exist_ok=True)
    flags = [f"-max_total_time={chosen.seconds}", "-rss_limit_mb=4096", "-timeout=30", f"-artifact_prefix={seeds}/"]
    atheris.Setup([sys.argv[0], *flags, str(corpus), str(seeds)], TARGETS[chosen.target]())
    atheris.Fuzz()


if __name__ == "__main__":
    main()
