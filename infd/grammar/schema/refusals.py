"""Errors of a client's JSON Schema, with the JSON pointer of the keyword at fault."""

from __future__ import annotations

from infd.errors import GrammarFailed, shorten

Path = tuple[str | int, ...]  # keys and indices from the root of the client's schema


class Unlocated(GrammarFailed):
    """A refusal without a path. `faults.located` finds the path."""


def pointer(path: Path) -> str:
    """Return a path as a JSON pointer within a URI fragment, without percent-encoding."""
    return "#" + "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in path)


def failed(path: Path, message: str, code: str = "unsupported_grammar") -> GrammarFailed:
    """Return the refusal of a schema that the engine cannot enforce."""
    return GrammarFailed(f"the schema at {shorten(pointer(path))}: {message}", code=code)


def invalid(path: Path, message: str) -> GrammarFailed:
    """Return the refusal of a schema that violates JSON Schema."""
    return failed(path, message, "invalid_grammar")
