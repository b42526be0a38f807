"""Refusals of a client's JSON Schema, which name the JSON pointer of the keyword at fault."""

from __future__ import annotations

from infd.errors import GrammarFailed, shorten

Path = tuple[str | int, ...]  # keys and indices from the root of the client's schema


def pointer(path: Path) -> str:
    return "#" + "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in path)


def failed(path: Path, message: str, code: str = "unsupported_grammar") -> GrammarFailed:
    return GrammarFailed(f"the schema at {shorten(pointer(path))}: {message}", code=code)


def invalid(path: Path, message: str) -> GrammarFailed:
    return failed(path, message, "invalid_grammar")
