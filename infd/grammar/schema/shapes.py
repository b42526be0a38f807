"""The shapes of converted schemas, and functions that read one schema without its definitions.

A converted schema is True, False, or a dict of one of these shapes:

    {"$ref": name}           name of a definition
    {"allOf": [...]}         conjunction
    {"anyOf": [...]}         disjunction
    {"oneOf": [...], "beside": schema, "at": path}
                             exactly one of the options accepts, within `beside`; `at` is the path of the oneOf.
                             Replaced by a disjunction once all definitions are converted
    a leaf                   `type`, `enum` and the keywords of KEYWORD_TYPES

A leaf's `type` is a list. `notIn` lists excluded strings; `notPrefix` lists prefixes, and excludes every string that
begins with one of them. `hardening` replaces both by `pattern`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Schema = Any

# JSON Schema's types as sets of atomic types, which have no value in common.
TYPES = {
    "null": frozenset({"null"}),
    "boolean": frozenset({"boolean"}),
    "integer": frozenset({"integer"}),
    "number": frozenset({"integer", "fraction"}),
    "string": frozenset({"string"}),
    "array": frozenset({"array"}),
    "object": frozenset({"object"}),
}
ALL = frozenset().union(*TYPES.values())
NUMBER = TYPES["number"]
OTHERS = "additionalProperties"
KEYWORD_TYPES = {  # the atomic types that a keyword constrains
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBER),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format", "notIn", "notPrefix"), frozenset({"string"})),
    **dict.fromkeys(("prefixItems", "items", "minItems", "maxItems"), frozenset({"array"})),
    **dict.fromkeys(
        ("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        frozenset({"object"}),
    ),
}


class Inexpressible(Exception):
    """A set of documents has no form in the engine's keywords. The message names the set.

    The caller that knows the path raises GrammarFailed instead.
    """


def type_of(value: Any) -> str:
    """Return the atomic type of a JSON value: a member of ALL."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def key(value: Any) -> Any:
    """Return a hashable key, equal for values that are equal in JSON Schema: for 1 and 1.0, but not for 1 and true."""
    match value:
        case bool() | None | str():
            return (type_of(value), value)
        case int() | float():
            return ("number", value)
        case list() | tuple():
            return ("array", tuple(key(v) for v in value))
    return ("object", frozenset((k, key(v)) for k, v in value.items()))


def among(schemas: list[Schema], schema: Schema) -> bool:
    """Return whether a list contains a schema. Python's `in` would confuse an enum of 1 with an enum of true."""
    return any(other == schema and key(other) == key(schema) for other in schemas)


def names_of(atoms: frozenset[str]) -> list[str]:
    """Return atomic types as values of `type`. Raises Inexpressible for fractions without integers."""
    if "fraction" in atoms and "integer" not in atoms:
        raise Inexpressible("numbers that are not integers")
    return [t for t, a in TYPES.items() if a <= atoms and not (t == "integer" and "fraction" in atoms)]


def atoms_of_leaf(leaf: dict[str, Any]) -> frozenset[str]:
    """Return the atomic types that the `type` and `enum` of a leaf allow."""
    atoms: frozenset[str] = ALL
    if "type" in leaf:
        names = leaf["type"] if isinstance(leaf["type"], list) else [leaf["type"]]
        atoms = frozenset().union(*(TYPES[n] for n in names))
    if "enum" in leaf:
        atoms &= {type_of(v) for v in leaf["enum"]}
    return atoms


def keywords_of(schema: Schema) -> dict[str, Any]:
    """Return a schema as a dict; True and False have no keywords."""
    return schema if isinstance(schema, dict) else {}


def parts_of(schema: Schema) -> list[dict[str, Any]]:
    """Return the members of a conjunction. Another dict is its own only member; True and False have no members."""
    leaf = keywords_of(schema)
    parts: list[dict[str, Any]] = leaf.get("allOf", [leaf] if leaf else [])
    return parts


def options_of(schema: dict[str, Any]) -> list[Schema]:
    """Return the options of anyOf or oneOf; an empty list for another schema."""
    return schema.get("anyOf") or schema.get("oneOf") or []


def item(leaf: dict[str, Any], index: int) -> Schema:
    """Return the schema of an array's item at an index."""
    prefix = leaf.get("prefixItems", ())
    return prefix[index] if index < len(prefix) else leaf.get("items", True)


def is_dead(leaf: dict[str, Any], name: str) -> bool:
    """Return whether a leaf forbids a property."""
    if name in leaf.get("properties", {}):
        return leaf["properties"][name] is False
    return leaf.get(OTHERS) is False and "patternProperties" not in leaf


def all_of(several: Iterable[bool | None]) -> bool | None:
    """Return the conjunction of truth values; None stands for unknown."""
    found = list(several)
    return False if False in found else None if None in found else True


def children(schema: dict[str, Any]) -> Iterator[Schema]:
    """Yield the schemas directly inside a schema."""
    for keyword, value in schema.items():
        if keyword in ("anyOf", "allOf", "prefixItems"):
            yield from value
        elif keyword in ("properties", "patternProperties"):
            yield from value.values()
        elif keyword in ("items", OTHERS):
            yield value


def rebuilt(schema: dict[str, Any], change: Callable[[Schema], Schema]) -> dict[str, Any]:
    """Return a copy of a schema in which `change` has replaced each directly contained schema."""
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ("anyOf", "allOf", "prefixItems"):
            out[keyword] = [change(s) for s in value]
        elif keyword in ("properties", "patternProperties"):
            out[keyword] = {k: change(s) for k, s in value.items()}
        elif keyword in ("items", OTHERS):
            out[keyword] = change(value)
        else:
            out[keyword] = value
    return out


def refs(schema: Schema) -> Iterator[str]:
    """Yield the names of the definitions to which a schema refers."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"]
        for child in children(schema):
            yield from refs(child)
