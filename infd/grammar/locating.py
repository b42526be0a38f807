"""Find the part of a client's schema that llguidance refuses. llguidance's own messages name no path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from infd.constraint import AfterThought, Calls, Headed, JsonSchema
from infd.errors import GrammarFailed
from infd.grammar import arguments, bounds
from infd.grammar.schema.faults import located
from infd.grammar.schema.rewriting import prepare_part
from infd.grammar.writing import encoded, with_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.constraint import Constraint
    from infd.grammar.protocol import Limits
    from infd.grammar.schema.refusals import Path

    Compile = Callable[[bytes], object]

_SECONDS: Final = 0.5  # most time to find the refused part of a schema


def locate(constraint: Constraint, limits: Limits, compile_: Compile) -> GrammarFailed | None:
    """Return the error, with its path, of the first schema that llguidance refuses alone; None if there is none.

    compile_  compiles a grammar, given as JSON text; raises GrammarFailed

    The error of a tool's schema has the tool's `param`. Schemas inside Lark and structural tags are not searched.
    """
    match constraint:
        case AfterThought(_, answer):
            return locate(answer, limits, compile_)
        case Headed(_, plain):
            return None if plain is None else locate(plain, limits, compile_)
        case JsonSchema(schema, lenient=False, coerce_one_of=False):
            return _located(bounds.read_json(schema, limits), limits, compile_)
        case Calls(_, tools, _, _, otherwise):
            for tool, schema in zip(tools, arguments.parsed(tools, limits), strict=True):
                if (error := _located(schema, limits, compile_)) is not None:
                    error.param = tool.param
                    return error
            return None if otherwise is None else locate(otherwise, limits, compile_)
    return None


def _located(schema: Any, limits: Limits, compile_: Compile) -> GrammarFailed | None:
    def check(path: Path) -> None:
        compile_(encoded({"json_schema": with_options(prepare_part(schema, path), limits)}))

    try:
        check(())
    except GrammarFailed as error:
        return located(schema, error, check, seconds=_SECONDS)
    return None
