"""Check the schemas of tools' arguments against limits, singly and together, and rewrite them for the engine."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct
from msgspec.structs import replace

from infd.errors import GrammarFailed
from infd.grammar import bounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from infd.grammar.protocol import Limits
    from infd.request import ToolSchema


_DEPTH: Final = 16  # most references and alternatives followed to find a type


class Parameter(Struct, frozen=True):
    """One argument of a tool, for a syntax of calls that writes each argument separately.

    texts     the allowed strings; None: any string, unless `document` is set
    document  the rewritten schema of a value that is no string; None: the value is a string
    """

    key: str
    required: bool
    texts: tuple[str, ...] | None = None
    document: Any = None


@contextmanager
def named(tool: ToolSchema) -> Iterator[None]:
    """Set `param` of errors to the request field of a tool's schema."""
    try:
        yield
    except GrammarFailed as error:
        error.param = tool.param
        raise


def prepared(tools: Sequence[ToolSchema], limits: Limits, prepare: Callable[[Any, Limits], Any]) -> list[Any]:
    """Return the schemas of the tools' arguments. Raises GrammarFailed with the `param` of the tool at fault.

    prepare  returns a schema that the engine keeps exactly
    """
    schemas = []
    for tool, schema in zip(tools, parsed(tools, limits), strict=True):
        with named(tool):
            schemas.append(prepare(schema, limits))
    return schemas


def parsed(tools: Sequence[ToolSchema], limits: Limits) -> list[Any]:
    """Return the schemas of the tools' arguments as clients wrote them. Raises GrammarFailed as `prepared`."""
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
    bounds.check_schema(found, replace(limits, depth=limits.depth + 1))  # together, because their times add up
    return found


def parameters(
    tools: Sequence[ToolSchema], limits: Limits, prepare: Callable[[Any, Limits], Any]
) -> list[list[Parameter]]:
    """Return the arguments of each tool in the order of its schema. Raises GrammarFailed as `prepared` does.

    A string may be any text unless the schema enumerates strings: length and pattern are not kept, nor are conditions
    that concern several arguments. Further arguments that the schema does not name are left out.
    """
    found = []
    for tool in tools:
        with named(tool):
            root = bounds.read_json(tool.parameters, limits)
            schema = _followed(root, root)
            properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
            required = schema.get("required", []) if isinstance(schema, dict) else []
            names = dict.fromkeys([*properties, *(each for each in required if isinstance(each, str))])
            definitions = {key: root[key] for key in ("$defs", "definitions") if isinstance(root, dict) and key in root}
            found.append(
                [
                    _parameter(key, properties.get(key, {}), key in required, root, definitions, limits, prepare)
                    for key in names
                ]
            )
    return found


def _parameter(
    key: str,
    schema: Any,
    required: bool,
    root: Any,
    definitions: dict[str, Any],
    limits: Limits,
    prepare: Callable[[Any, Limits], Any],
) -> Parameter:
    if not _may_be_string(schema, root):
        return Parameter(key, required, document=prepare({**definitions, **schema}, limits))
    followed = _followed(schema, root)
    values = (
        followed.get("enum", [followed["const"]] if "const" in followed else None) if followed is not True else None
    )
    if isinstance(values, list) and all(isinstance(each, str) for each in values):
        return Parameter(key, required, texts=tuple(values))
    return Parameter(key, required)


def _followed(schema: Any, root: Any) -> Any:
    """Return a schema, or the target of its `$ref`; True if the target is missing."""
    for _ in range(_DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        found = root
        for name in schema["$ref"].removeprefix("#").split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) else True


def _may_be_string(schema: Any, root: Any, depth: int = _DEPTH) -> bool:
    schema = _followed(schema, root)
    if schema is True or not depth:
        return True
    stated = schema.get("type")
    if isinstance(stated, str | list):
        return "string" in ([stated] if isinstance(stated, str) else stated)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return any(isinstance(each, str) for each in values)
    for word, joined in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if isinstance(options := schema.get(word), list) and options:
            return joined(_may_be_string(each, root, depth - 1) for each in options)
    return "properties" not in schema and "items" not in schema
