"""Errors of constraints that llguidance refuses. Words in llguidance's messages determine the errors' codes."""

from __future__ import annotations

import re
from typing import Final

from infd.errors import GrammarFailed

_LARGE: Final = (
    *("too many", "Too many", "too large", "too big", "too complex"),
    *("limit", "fuel", "max is", "recursion", "level exceeded"),
)
_UNSUPPORTED: Final = ("nimplemented", "not supported", "nsupported", "not disjoint", "Unknown format", "retriev")
_AMBIGUOUS: Final = ("Too many items", "items; max is")  # limits of llguidance's parser, also while an answer grows
_EMPTY: Final = ("NoExtension", "Unsatisfiable")


def refused(message: str) -> GrammarFailed:
    """Return the error of a grammar that llguidance did not compile."""
    if message.startswith("panic"):
        advice = "alternatives of classes whose characters overlap may have to be written as one class"
        failed = f"llguidance fails on the constraint ({shortened(message)}): {advice}"
        return GrammarFailed(failed, code="unsupported_grammar")
    if _ambiguous(message):
        return GrammarFailed(_advised(message), code="grammar_too_large")
    if any(word in message for word in _EMPTY):
        return GrammarFailed("no text satisfies the constraint", code="invalid_grammar")
    if any(word in message for word in _LARGE):
        return GrammarFailed(f"the constraint is too large: {shortened(message)}", code="grammar_too_large")
    if any(word in message for word in _UNSUPPORTED):
        return GrammarFailed(f"the constraint cannot be kept: {shortened(message)}", code="unsupported_grammar")
    return GrammarFailed(f"the constraint is malformed: {shortened(message)}", code="invalid_grammar")


def failed(message: str) -> GrammarFailed:
    """Return the error of an answer that llguidance could not follow."""
    if _ambiguous(message):
        return GrammarFailed(_advised(message))
    return GrammarFailed(f"the answer left its constraint: {shortened(message)}")


def _ambiguous(message: str) -> bool:
    """Return whether llguidance found too many readings of a text."""
    return any(word in message for word in _AMBIGUOUS)


def _advised(message: str) -> str:
    return (
        "the constraint has too many readings of one text: derive each text in one way only, and leave out of the "
        f"classes of plain text the characters with which other parts begin and end ({shortened(message)})"
    )


def shortened(message: str) -> str:
    """Return the first line of a message; for a malformed regular expression, add the reason from a later line.

    Pointers into the rewritten schema, which a client does not know, are left out.
    """
    lines = message.strip().splitlines() or ["failed"]
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    # Truncated before the search, which takes time quadratic in the length of a run of spaces: a line may contain
    # 200,000 spaces.
    first = re.sub(r":? *json-schema:\S*", "", lines[0][:600]).strip()
    if reason is None:
        return first[:300]
    return f"{first.removesuffix(' regex parse error:')[:300]} {reason[:300]}"
