"""Log the status and every request (on USR1), and all stacks (on QUIT, and when a step is stuck)."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from infd.admin.stacks import task_stacks, thread_stacks

if TYPE_CHECKING:
    from infd.engine.engine import Engine

log = logging.getLogger("infd.daemon")


def status(engine: Engine) -> None:
    """Log the status, and a line for each request."""
    fields = msgspec.to_builtins(engine.status())
    since = datetime.fromtimestamp(fields.pop("since"), UTC).isoformat(timespec="milliseconds")
    ended = {f"terminal_{reason}": count for reason, count in fields.pop("terminal").items()}
    log.info("status", extra={**fields, "since": since, **ended})
    for row in engine.requests():
        fields = msgspec.to_builtins(row)
        log.info("status of a request", extra={"request_id": fields.pop("id"), **fields})


def stacks() -> None:
    """Log the stack of every task and every thread."""
    for kind, found in (("task", task_stacks()), ("thread", thread_stacks())):
        for stack in found:
            log.critical("%s %s\n%s", kind, stack.name, "\n".join(stack.frames))
