"""Check the argument schemas of tools against the limits, one by one and together, and rewrite the schemas."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from infd.errors import GrammarFailed
from infd.grammar import bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infd.constraint import ToolSchema
    from infd.grammar.protocol import Limits


@contextmanager
def named(tool: ToolSchema) -> Iterator[None]:
    """Set the `param` of a GrammarFailed raised in the block to the request field of the tool's schema."""
    try:
        yield
    except GrammarFailed as error:
        error.param = tool.param
        raise


def prepared(tools: Sequence[ToolSchema], limits: Limits, prepare: Callable[[Any, Limits], Any]) -> list[Any]:
    """Return the argument schemas of tools, rewritten. Raises GrammarFailed with a tool's `param`.

    prepare  rewrites a schema into a schema that the engine enforces exactly
    """
    schemas = []
    for tool, schema in zip(tools, parsed(tools, limits), strict=True):
        with named(tool):
            schemas.append(prepare(schema, limits))
    return schemas


def parsed(tools: Sequence[ToolSchema], limits: Limits) -> list[Any]:
    """Return the argument schemas of tools, not rewritten except that `type` is "object".

    Raises GrammarFailed like `prepared`.
    """
    bounds.check_text("".join(tool.parameters for tool in tools), limits)
    found: list[Any] = []
    for tool in tools:
        with named(tool):
            schema = bounds.read_json(tool.parameters, limits)
            if schema is True:
                schema = {}
            types = schema.get("type", "object") if isinstance(schema, dict) else "object"
            if types != "object" and not (isinstance(types, list) and "object" in types):
                raise GrammarFailed("the arguments of a tool are an object", code="invalid_grammar")
            bounds.check_schema(schema, limits)
            found.append({**schema, "type": "object"} if isinstance(schema, dict) else schema)
    # One grammar contains all schemas. The list around them adds a level of nesting.
    bounds.check_schema(found, replace(limits, depth=limits.depth + 1))
    return found
