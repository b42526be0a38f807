"""How many examples tests take: some in `make test`, all in `make test-all`, which repeats tests marked `histories`."""

from __future__ import annotations

import os

THOROUGH = "INFD_TEST_HISTORIES" in os.environ
