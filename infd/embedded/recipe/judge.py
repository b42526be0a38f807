"""Compare answers with a conversation's expectations."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.embedded.recipe.conversation import Expect


def meets(expect: Expect, answer: str, calls: Sequence[dict[str, Any]]) -> bool:
    """Return whether an answer meets `expect`.

    answer  text, without reasoning and calls
    calls   [{"name": ..., "arguments": {...}}]
    """
    if expect.text is not None and _spaced(answer) != _spaced(expect.text):
        return False
    if not all(any(contains_words(answer, word) for word in group) for group in expect.contains):
        return False
    if expect.calls is not None and not _equal_json([_bare(call) for call in calls], expect.calls):
        return False
    return expect.json is None or _is_json(answer, expect.json)


def contains_words(answer: str, words: str) -> bool:
    """Return whether `answer` contains `words` as whole words; a number includes its sign and fraction."""
    words = _spaced(words)
    before = r"(?<![\w.-])" if words[:1].isdigit() else r"(?<!\w)"
    after = r"(?![\w]|[.,]\d)" if words[-1:].isdigit() else r"(?!\w)"
    return re.search(before + re.escape(words) + after, _spaced(answer), re.IGNORECASE) is not None


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _bare(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["name"], "arguments": call["arguments"]}


def _is_json(answer: str, expected: Any) -> bool:
    try:
        value = json.loads(answer)
    except ValueError:
        return False
    return _equal_json(value, expected)


def _equal_json(left: Any, right: Any) -> bool:
    """Return whether two JSON values are equal; unlike in Python, true does not equal 1."""
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal_json(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal_json, left, right))
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)
