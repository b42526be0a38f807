"""`infd`, but the device is lost at the first step of a sequence whose tokens contain POISON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infd.cli import main
from infd.errors import DeviceLost
from infd.runner.runner import Runner

if TYPE_CHECKING:
    from infd.runner.runner import Forwarded
    from infd.scheduler.plan import StepPlan

POISON = 777


def poison() -> None:
    forward = Runner.forward

    def poisoned(runner: Runner, plan: StepPlan) -> Forwarded:
        if any(POISON in join.tokens for join in plan.joins):
            raise DeviceLost("an uncorrectable error")
        return forward(runner, plan)

    Runner.forward = poisoned  # type: ignore[method-assign]


if __name__ == "__main__":
    poison()
    main()
