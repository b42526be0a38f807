"""Rewrite recursive definitions for llguidance, and find definitions that only infinite documents satisfy.

llguidance intersects a `$ref` with the schemas beside it by intersecting the definition, but refuses to do so while it
compiles that definition. So each conjunction with a recursive definition becomes a definition of its own, in which the
recursive definition is written out. Where such a conjunction occurs inside itself, a `$ref` without siblings replaces
the inner conjunction.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING

from infd.grammar.schema.algebra import ALTERNATIVES
from infd.grammar.schema.shapes import ALL, Schema, atoms_of_leaf, item, rebuilt, refs

if TYPE_CHECKING:
    from collections.abc import Container


class Conjunctions:
    """Makes definitions of conjunctions with recursive definitions.

    definitions  name -> schema; `rewrite` adds definitions
    origins      name of an added definition -> name of a recursive definition in its conjunction
    """

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self.definitions = definitions
        self._originals = dict(definitions)
        self.origins: dict[str, str] = {}
        self._recursive = _on_cycles({name: set(refs(schema)) for name, schema in definitions.items()})
        self._names: dict[str, str] = {}  # JSON text of the members -> name of the added definition

    def rewrite(self, schema: Schema) -> Schema:
        """Return the schema with a `$ref` in place of each conjunction with a recursive definition."""
        if not isinstance(schema, dict):
            return schema
        origin = next((p["$ref"] for p in schema.get("allOf", ()) if p.get("$ref") in self._recursive), None)
        if origin is None:
            return rebuilt(schema, self.rewrite)
        known = json.dumps(schema["allOf"])
        if known not in self._names:
            name = self._names[known] = f"all{len(self._names)}"
            self.origins[name] = origin
            self.definitions[name] = {"allOf": [self.rewrite(part) for part in self._flat(schema["allOf"], set())]}
        return {"$ref": self._names[known]}

    def _flat(self, parts: list[Schema], seen: set[str]) -> list[Schema]:
        """Return the members of a conjunction, with the definition's members in place of each `$ref`."""
        flat: list[Schema] = []
        for part in parts:
            if isinstance(part, dict) and "$ref" in part:
                if part["$ref"] not in seen:
                    seen.add(part["$ref"])
                    flat += self._flat([self._originals[part["$ref"]]], seen)
            elif isinstance(part, dict) and "allOf" in part:
                flat += self._flat(part["allOf"], seen)
            else:
                flat.append(part)
        return flat


def _on_cycles(uses: dict[str, set[str]]) -> set[str]:
    """Return the names on cycles of references, and the names on paths from one cycle to another."""
    users: dict[str, set[str]] = {name: set() for name in uses}
    for name, used in uses.items():
        for each in used:
            users[each].add(name)
    left = set(uses)
    for forward, backward in ((uses, users), (users, uses)):
        degrees = {name: len(forward[name] & left) for name in left}
        todo = [name for name, degree in degrees.items() if not degree]
        while todo:
            name = todo.pop()
            left.discard(name)
            for each in backward[name] & left:
                degrees[each] -= 1
                if not degrees[each]:
                    todo.append(each)
    return left


def endless(definitions: dict[str, Schema]) -> str | None:
    """Return the name of a definition that only infinite documents satisfy; None if there is no such definition."""
    users: dict[str, list[str]] = {name: [] for name in definitions}
    for name, schema in definitions.items():
        for used in set(refs(schema)):
            users[used].append(name)
    # A schema that accepts no document even if every definition accepts some is not endless but equal to `false`, and
    # the engine refuses it. So `ended` contains such schemas.
    ended = {name for name, schema in definitions.items() if not _ends(schema, definitions)}
    todo = list(definitions)
    while todo:
        name = todo.pop()
        if name not in ended and _ends(definitions[name], ended):
            ended.add(name)
            todo += users[name]
    return min(definitions.keys() - ended, default=None)


def _ends(schema: Schema, ended: Container[str]) -> bool:
    """Return whether a schema accepts a document if only the definitions in `ended` accept any; True if unsure."""
    if not isinstance(schema, dict):
        return bool(schema)
    if "$ref" in schema:
        return schema["$ref"] in ended
    if "anyOf" in schema:
        return any(_ends(each, ended) for each in schema["anyOf"])
    if "allOf" in schema:
        parts = schema["allOf"]
        if not all(_ends(each, ended) for each in parts):
            return False
        options = [part.get("anyOf", [part]) for part in parts]
        if math.prod(map(len, options)) > ALTERNATIVES:
            return True
        return any(_end_together(list(chosen), ended) for chosen in itertools.product(*options))
    return _end_together([schema], ended)


def _end_together(parts: list[Schema], ended: Container[str]) -> bool:
    """Return, like `_ends`, whether all parts accept a common document. Compares only types and required values."""
    if not all(_ends(part, ended) for part in parts if not isinstance(part, dict) or "allOf" in part or "$ref" in part):
        return False
    leaves = [part for part in parts if isinstance(part, dict) and not part.keys() & {"$ref", "anyOf", "allOf"}]
    if any("enum" in leaf for leaf in leaves):
        return True
    atoms = ALL.intersection(*map(atoms_of_leaf, leaves))
    if not atoms or atoms - {"object", "array"}:
        return bool(atoms)
    required = {name for leaf in leaves for name in leaf.get("required", ())}
    least = min(max((leaf.get("minItems", 0) for leaf in leaves), default=0), 100)
    values = (leaf["properties"][name] for leaf in leaves for name in required if name in leaf.get("properties", {}))
    items = (item(leaf, index) for leaf in leaves for index in range(least))
    return ("object" in atoms and all(_ends(value, ended) for value in values)) or (
        "array" in atoms and all(_ends(each, ended) for each in items)
    )
