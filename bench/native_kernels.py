"""Refuse to measure infd on a CPU without its native kernels: the figures would be those of plain torch."""

from __future__ import annotations

# A part of the line that a daemon logs at its start without native kernels.
LOGGED = "native kernels are not used"


def require_native_kernels() -> None:
    """Exit, with the reason and the remedy, if the native kernels of this infd cannot be used."""
    from infd.kernels.cpu.library import why_not

    if (reason := why_not()) is not None:
        raise SystemExit(f"nothing is measured: {LOGGED}: {reason}")
