"""Find the part of a client's schema that causes an error, for errors that name no path."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from infd.errors import GrammarFailed
from infd.grammar.schema.references import References
from infd.grammar.schema.refusals import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from infd.grammar.schema.refusals import Path

_ONE = ("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "if", "then", "else", "not")
_SEVERAL = ("allOf", "anyOf", "oneOf", "items", "prefixItems")
_NAMED = ("properties", "patternProperties", "dependencies", "dependentSchemas")


def located(schema: Any, error: GrammarFailed, check: Callable[[Path], object], *, seconds: float) -> GrammarFailed:
    """Return `error` with the path of the smallest part of the schema that causes the same error on its own.

    check    checks the part at a path without the other parts; raises the part's error
    seconds  time after which the smallest part found so far is returned
    """
    references = References(schema)
    ends = time.monotonic() + seconds
    path: Path = ()
    seen: set[Path] = {path}
    todo = _parts(references, path)
    while (part := next(todo, None)) is not None and time.monotonic() < ends:
        if part in seen:
            continue
        seen.add(part)
        try:
            check(part)
        except GrammarFailed as failure:
            if str(failure) == str(error):
                path, todo = part, _parts(references, part)
    return failed(path, str(error), error.code or "unsupported_grammar")


def part_at(schema: Any, path: Path) -> Any:
    """Return the part of a client's schema at a path."""
    for step in path:
        schema = schema[int(step)] if isinstance(schema, list) else schema[step]
    return schema


def _parts(references: References, path: Path) -> Iterator[Path]:
    """Yield the paths of the schemas directly inside a part, and of the target of its `$ref`."""
    node = part_at(references.root, path)
    if not isinstance(node, dict):
        return
    if "$ref" in node:
        with suppress(GrammarFailed):  # conversion refuses this reference and names its path
            yield references.target(node["$ref"], (*path, "$ref"))[1]
        if references.draft <= 7:
            return
    for keyword in _ONE:
        if isinstance(node.get(keyword), dict):
            yield (*path, keyword)
    for keyword in _SEVERAL:
        if isinstance(several := node.get(keyword), list):
            yield from ((*path, keyword, index) for index in range(len(several)))
    for keyword in _NAMED:
        if isinstance(named := node.get(keyword), dict):
            yield from ((*path, keyword, name) for name in named)
