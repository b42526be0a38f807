"""`infdctl`. Imports neither torch nor server code, so that a command answers in tens of milliseconds."""

from infd.admin.ctl.app import cli, main

__all__ = ["cli", "main"]
