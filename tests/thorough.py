"""How many examples tests take: some in `make test`, more in `make test-all`, most in `make soak`.

`make test-all` repeats tests marked `histories`; `make soak` runs the files that it names, whole.
"""

from __future__ import annotations

import os

THOROUGH = "INFD_TEST_HISTORIES" in os.environ
SOAK = "INFD_SOAK" in os.environ


def among(quick: int, thorough: int, soak: int | None = None) -> int:
    """Return the number of examples for this run. soak: None: as many as `thorough`."""
    if SOAK and soak is not None:
        return soak
    return thorough if THOROUGH or SOAK else quick
