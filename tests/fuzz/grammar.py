"""JSON generated from bytes, so that mutations change its meaning instead of breaking its syntax."""

from __future__ import annotations

import json
from typing import Any

NUMBERS: tuple[Any, ...] = (0, 1, -1, 2, 7, 128, 129, 2**31, 2**63, -(2**63) - 1, 0.5, -0.0, 1e308, 1.5, 2.0)
STRINGS = ("", "a", "user", "assistant", "system", "text", "json_object", "\ud83d\ude00", "\x00", "x" * 300, "../..")
RAW = ("NaN", "1e999", "-1e999", '"\\ud800"', "[" * 200, '{"a":1,"a":2}', "tru", "\ufeff1", "1" * 400)


class Chooser:
    """Derives choices from bytes; after the last byte every choice is the first option."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def below(self, count: int) -> int:
        if self._at >= len(self._data):
            return 0
        self._at += 1
        return self._data[self._at - 1] % count

    def pick(self, options: Any) -> Any:
        return options[self.below(len(options))]


def value(choose: Chooser, names: tuple[str, ...], depth: int = 0) -> str:
    """Return a JSON value."""
    match choose.below(9 if depth < 5 else 5):
        case 0 | 1:
            return json.dumps(choose.pick(NUMBERS))
        case 2:
            return json.dumps(choose.pick(STRINGS))
        case 3:
            return choose.pick(("null", "true", "false"))  # type: ignore[no-any-return]
        case 4:
            return choose.pick(RAW) if choose.below(8) == 7 else json.dumps(choose.pick(names))
        case 5 | 6:
            return f"[{','.join(value(choose, names, depth + 1) for _ in range(choose.below(4)))}]"
        case _:
            return mapping(choose, names, depth + 1)


def mapping(choose: Chooser, names: tuple[str, ...], depth: int = 0) -> str:
    """Return a JSON object, whose keys are mostly from `names`."""
    members = (f"{json.dumps(choose.pick(names))}:{value(choose, names, depth)}" for _ in range(choose.below(8)))
    return f"{{{','.join(members)}}}"
