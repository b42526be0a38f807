"""`infd`, but its sampler replays answers: INFD_REPLAY names a JSON file {"opening": [ids], "answers": [[ids], ...]}.

The number of openings of an assistant's message in a prompt is the number of the answer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from infd.cli import main
from infd.runner.runner import Runner

if TYPE_CHECKING:
    from infd.runner.runner import Forwarded, PendingResult
    from infd.scheduler.plan import StepPlan, StepResult


def replay(opening: list[int], answers: list[list[int]]) -> None:
    forward, read = Runner.forward, Runner.read
    rows: dict[int, tuple[int, list[int]]] = {}  # prompt's length and answer, by row

    def joined(runner: Runner, plan: StepPlan) -> Forwarded:
        for join in plan.joins:
            prompt = join.tokens[: join.prompt_tokens]
            places = range(len(prompt) - len(opening) + 1)
            found = sum(prompt[place : place + len(opening)] == opening for place in places)
            rows[join.row] = join.prompt_tokens, answers[min(found, len(answers)) - 1]
        return forward(runner, plan)

    def replaced(runner: Runner, pending: PendingResult) -> StepResult:
        result = read(runner, pending)
        said = 0
        for span, accepted in zip(pending.plan.spans, result.accepted, strict=True):
            if accepted:
                prompt, answer = rows[span.row]
                result.tokens[said] = answer[min(span.start + span.count - prompt, len(answer) - 1)]
                said += accepted
        return result

    Runner.forward, Runner.read = joined, replaced  # type: ignore[method-assign]


if __name__ == "__main__":
    given = json.loads(Path(os.environ["INFD_REPLAY"]).read_text())
    replay(given["opening"], given["answers"])
    main()
