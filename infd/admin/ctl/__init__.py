"""`infdctl`. Kept light: no torch, no server code; a command answers in tens of milliseconds."""

from infd.admin.ctl.app import cli, main

__all__ = ["cli", "main"]
