"""Rewrite a client's JSON Schema into keywords that the engine enforces exactly, or refuse the schema.

The result is a schema of draft 2020-12 and accepts exactly the documents that the client's schema accepts. `$schema` in
the client's schema names the client's draft. The result contains `$ref`, `anyOf`, `allOf`, `type`, `enum`, and the
bounds, patterns, formats, items and properties of one type. `oneOf`, `not`, `if` and the dependencies become
alternatives: a negation is pushed inwards until it is a type, a bound, a list of values or an absent property. A schema
is refused if a negation cannot be pushed so far, or if an array has `uniqueItems` and its items are not enumerated.
GrammarFailed then names the JSON pointer and the keyword.

Formats that the engine does not support are annotations, as the specification allows.
Sources: JSON Schema drafts 4 to 2020-12.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from infd.grammar.schema.algebra import NODES
from infd.grammar.schema.conversion import Conversion
from infd.grammar.schema.faults import located, part_at
from infd.grammar.schema.hardening import Hardening
from infd.grammar.schema.recursion import Conjunctions, endless
from infd.grammar.schema.refusals import Unlocated, failed
from infd.grammar.schema.shapes import Inexpressible, Schema, children, rebuilt, refs

if TYPE_CHECKING:
    from infd.grammar.schema.refusals import Path

_LOCATING_S = 0.3  # most time to find the part of a refused schema that is at fault


def prepare(schema: Any) -> Schema:
    """Return an equivalent schema in keywords that the engine enforces exactly.

    Takes milliseconds for schemas of some KB; `schema` is not changed.

    Raises GrammarFailed: invalid_grammar for a malformed schema, unsupported_grammar for a schema that cannot be
    enforced exactly, grammar_too_large if the result would be too large.
    """
    try:
        return prepare_part(schema, ())
    except Unlocated as error:
        raise located(schema, error, partial(prepare_part, schema), seconds=_LOCATING_S) from None


def prepare_part(schema: Any, path: Path) -> Schema:
    """Return the part of a client's schema at a path, rewritten like `prepare`. May raise Unlocated."""
    try:
        return _rewritten(schema, path)
    except RecursionError:
        raise failed((), "it is nested too deep to be rewritten", "grammar_too_large") from None
    except Inexpressible as set_:
        raise Unlocated(f"{set_} cannot be kept apart", code="unsupported_grammar") from None


def _rewritten(schema: Any, path: Path) -> Schema:
    conversion = Conversion(schema)
    root = conversion.convert(part_at(schema, path), path)
    definitions = conversion.definitions
    definitions.finish(conversion.convert)
    hardening = Hardening(conversion.negation)
    root = hardening.harden(root)
    if root is False:
        raise failed((), "no document satisfies it")
    if root is True:
        return {}
    out = dict(root) if isinstance(root, dict) else {}
    reached: dict[str, Schema] = {}
    todo = [out]
    while todo:
        for name in refs(todo.pop()):
            if name not in reached:
                reached[name] = hardening.harden(definitions.schemas[name])
                todo.append(reached[name])
    conjunctions = Conjunctions(reached)
    out = conjunctions.rewrite(out)
    for name in list(reached):
        reached[name] = conjunctions.rewrite(reached[name])
    if (found := endless(reached)) is not None:
        where = definitions.path(conjunctions.origins.get(found, found))
        raise failed(where, "it refers to itself in every document, which never ends")
    nodes = _nodes(out) + sum(_nodes(s) for s in reached.values())
    if nodes > NODES:
        raise failed((), f"rewritten it has {nodes} parts, of at most {NODES}", "grammar_too_large")
    out = _linked(out)
    if reached:
        out["$defs"] = {name: _linked(s) for name, s in reached.items()}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **out}


def _nodes(schema: Schema) -> int:
    if not isinstance(schema, dict):
        return 1
    return 1 + len(schema.get("enum", ())) + sum(_nodes(c) for c in children(schema))


def _linked(schema: Schema) -> Schema:
    """Return the schema with a JSON pointer in each `$ref`, in place of a definition's name."""
    if not isinstance(schema, dict):
        return schema
    return {"$ref": f"#/$defs/{schema['$ref']}"} if "$ref" in schema else rebuilt(schema, _linked)
