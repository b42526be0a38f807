"""The arguments of tools in syntaxes that write each argument separately, and strings without quotes.

The schema of an argument is split into alternatives. Alternatives for strings become regular expressions that match
whole texts; alternatives for other values become JSON documents. If the schema restricts values of another type, the
regular expressions exclude texts that the parser would read as that type.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

from msgspec import Struct

from infd.errors import GrammarFailed
from infd.grammar import bounds
from infd.grammar.arguments import named
from infd.grammar.formats import PATTERNS
from infd.grammar.schema.rewriting import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.constraint import CallSyntax, ToolSchema
    from infd.grammar.protocol import Limits

_DEPTH: Final = 16  # most levels of references and alternatives
_UNREADABLE: Final = re.compile(r'[<>"]|\A\s|\s\Z|\A\Z')
_SEPARATING: Final = re.compile(r"[,:{}\[\]]")
_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_UNNAMED: Final = ("additionalProperties", "unevaluatedProperties")  # ignored: `parameters` forbids unnamed arguments
_STATED: Final = frozenset({"$schema", "$defs", "type", "properties", "required", *_UNNAMED})
_TEXTS: Final = ("minLength", "maxLength", "pattern", "format")
_FIRST: Final = {"array": r"\[", "object": "{", "integer": r"0-9+\-.", "number": r"0-9+\-."}


class Parameter(Struct, frozen=True):
    """One argument.

    texts      values listed in an enum
    free       whether every text that matches all of `patterns` is a value
    patterns   regular expressions of Rust's regex crate
    documents  prepared schemas of values written as JSON
    """

    key: str
    required: bool
    texts: tuple[str, ...] = ()
    free: bool = False
    patterns: tuple[str, ...] = ()
    documents: tuple[Any, ...] = ()


class Parameters(Struct, frozen=True):
    """The arguments of one tool, in the order of its schema.

    other  if the schema names no argument: the form of arguments with any name; None: only `named` are allowed
    """

    named: tuple[Parameter, ...]
    other: Parameter | None = None


def parameters(
    tools: Sequence[ToolSchema], limits: Limits, syntax: CallSyntax, document: Callable[[Any, Limits], Any]
) -> list[Parameters]:
    """Return each tool's arguments. `arguments.prepared` has checked the schemas.

    document  rewrites the schema of a value for the engine

    Raises GrammarFailed with the `param` of a tool whose schema relates several arguments, or requires strings that
    cannot be written without quotes.
    """
    found = []
    for tool in tools:
        with named(tool):
            schema = bounds.read_json(tool.parameters, limits)
            stated = {"type": "object", **schema} if isinstance(schema, dict) else {"type": "object"}
            further = stated.get("additionalProperties", True)
            if further not in (True, False, {}) and not stated.get("properties"):
                _refuse("a schema of arguments without names")
            root = prepare({**stated, "additionalProperties": False})  # forbids unnamed arguments
            reader = _Quoted if syntax.quoted else _Reader
            reading = reader(root, limits, document, syntax)
            read = reading.all()
            found.append(Parameters(read, None if read or further is False else reading.any()))
    return found


class _Reader:
    """Reads the prepared schema of one tool's arguments."""

    def __init__(
        self,
        root: dict[str, Any],
        limits: Limits,
        document: Callable[[Any, Limits], Any],
        syntax: CallSyntax,
    ) -> None:
        self._root = root
        self._limits = limits
        self._document = document
        self._syntax = syntax

    def any(self) -> Parameter:
        """Return the form of an argument with any name and any value."""
        return Parameter("", required=False, free=True)

    def all(self) -> tuple[Parameter, ...]:
        root = self._root
        for _ in range(_DEPTH):
            if set(root) - {"$schema", "$defs", "$ref", "type"} or "$ref" not in root:
                break
            root = self._referred(root["$ref"])
        if set(root) - _STATED:
            _refuse("conditions that concern several arguments of a tool")
        properties, required = root.get("properties", {}), root.get("required", [])
        names = dict.fromkeys([*properties, *required])
        found = [self._parameter(name, properties.get(name, True), required=name in required) for name in names]
        return tuple(each for each in found if each is not None)

    def _parameter(self, key: str, schema: Any, *, required: bool) -> Parameter | None:
        if schema is False:
            return None if not required else _refuse("arguments that have no value")
        if _UNREADABLE.search(key) is not None or (self._syntax.separator and _SEPARATING.search(key) is not None):
            _refuse(f"the name {key!r}")
        texts: list[str] = []
        patterns: list[tuple[str, ...]] = []
        documents: list[dict[str, Any]] = []
        for branch in self._branches(schema, _DEPTH):
            match branch:
                case list():
                    texts += [each if isinstance(each, str) else json.dumps(each) for each in branch]
                case tuple():
                    patterns.append(branch)
                case _:
                    documents.append(branch)
        free = bool(patterns)
        if len(patterns) > 1:
            if all(patterns):
                _refuse(f"several kinds of strings for {key!r}")
            patterns = [()]
        kept = patterns[0] if patterns else ()
        if free:
            stated = [document for document in documents if set(document) - {"type"}]
            # No keyword restricts booleans or null, so a text that reads as one is a value.
            types = (each for document in stated for each in _types(document))
            first = "".join(dict.fromkeys(_FIRST.get(each, "") for each in types))
            if not kept and not stated:
                documents = []  # free text includes values of these types
            if first:
                kept = (*kept, rf"(?:[^\s{first}](?s:.)*)?")
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
        prepared = tuple(self._document({**definitions, **each}, self._limits) for each in documents)
        return Parameter(key, required, tuple(dict.fromkeys(texts)), free, kept, prepared)

    def _branches(self, schema: Any, depth: int) -> list[Any]:
        """Return a value's alternatives: each a list of values, a tuple of patterns of strings, or a JSON schema."""
        if not depth:
            _refuse("arguments whose type takes many references to find")
        if schema is False:
            return []
        if schema is True or not schema:
            return [()]
        words = {word: value for word, value in schema.items() if word not in ("$schema", "$defs")}
        if len(words) == 1 and "$ref" in words:
            return self._branches(self._referred(words["$ref"]), depth - 1)
        if len(words) == 1 and "anyOf" in words:
            return [branch for each in words["anyOf"] for branch in self._branches(each, depth - 1)]
        if "enum" in words:
            if set(words) > {"enum", "type"}:
                _refuse("enum of strings beside other keywords")
            return [words["enum"]]
        if mixed := sorted({"$ref", "anyOf", "allOf"} & set(words)):
            if "string" in self._types(schema, depth):
                _refuse(f"{mixed[0]} of strings beside other keywords")
            return [schema]
        types = _types(words)
        others = [each for each in types if each != "string"]
        found: list[Any] = [] if "string" not in types and "type" in words else [_patterns(words)]
        if others:
            found.append({**{word: value for word, value in words.items() if word not in _TEXTS}, "type": others})
        return found

    def _types(self, schema: Any, depth: int) -> set[str]:
        """Return a set that contains "string" unless the schema accepts no string. Other types count as "other"."""
        if not depth:
            _refuse("arguments whose type takes many references to find")
        if schema is False:
            return set()
        if schema is True:
            return {"string", "other"}
        parts = [self._types(each, depth - 1) for each in schema.get("allOf", ())]
        if "$ref" in schema:
            parts.append(self._types(self._referred(schema["$ref"]), depth - 1))
        if "anyOf" in schema:
            parts.append(set().union(*(self._types(each, depth - 1) for each in schema["anyOf"])))
        if "enum" in schema:
            parts.append({"string"} if any(isinstance(each, str) for each in schema["enum"]) else {"other"})
        if "type" in schema:
            parts.append({"string" if each == "string" else "other" for each in _types(schema)})
        return set.intersection(*parts) if parts else {"string", "other"}

    def _referred(self, reference: str) -> Any:
        return self._root["$defs"][reference.removeprefix("#/$defs/")]


class _Quoted(_Reader):
    """Reads schemas of arguments whose strings are quoted.

    Every value is JSON, except where the schema allows only booleans or only null: see `CallSyntax.constants`.
    """

    def any(self) -> Parameter:
        return Parameter("", required=False, documents=(self._document({}, self._limits),))

    def _parameter(self, key: str, schema: Any, *, required: bool) -> Parameter | None:
        if schema is False:
            return None if not required else _refuse("arguments that have no value")
        if _IDENTIFIER.match(key) is None:
            _refuse(f"the name {key!r}")
        true, false, null = self._syntax.constants
        match schema:
            case {"type": ["boolean"], **others} if not others:
                return Parameter(key, required, texts=(true, false))
            case {"type": ["null"], **others} if not others:
                return Parameter(key, required, texts=(null,))
        definitions = {"$defs": self._root["$defs"]} if "$defs" in self._root else {}
        stated = {} if schema is True else schema
        return Parameter(key, required, documents=(self._document({**definitions, **stated}, self._limits),))


def _types(schema: dict[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def _patterns(schema: dict[str, Any]) -> tuple[str, ...]:
    """Return patterns for a schema's keywords for strings; a string must match each pattern as a whole."""
    found = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        found.append(rf"(?s:.){{{least},{most}}}")
    if "format" in schema:
        found.append(f"(?:{PATTERNS[schema['format']]})")
    if "pattern" in schema:
        found.append(_whole(schema["pattern"]))
    return tuple(found)


def _whole(pattern: str) -> str:
    """Return a pattern that matches, as a whole, each string in which a pattern of JSON Schema matches somewhere."""
    body = pattern.removeprefix("^")
    ended = body.endswith("$") and (len(body) - len(body[:-1].rstrip("\\"))) % 2 == 1
    before = "" if body != pattern else "(?s:.)*"
    after = "" if ended else "(?s:.)*"
    body = body[:-1] if ended else body
    depth, bracket = 0, False
    for part in re.findall(r"\\.|.", body, re.DOTALL):
        anchored = part in ("\\b", "\\B") or (part in ("^", "$") and not bracket)
        if anchored or (part == "|" and not bracket and not depth and not (before and after)):
            _refuse("anchors within the pattern of a string")
        depth += (part == "(") - (part == ")") if not bracket else 0
        bracket = part == "[" or (bracket and part != "]")
    return f"{before}(?:{body}){after}"


def _refuse(what: str) -> NoReturn:
    message = f"{what}: not supported where the model writes arguments one by one"
    raise GrammarFailed(message, code="unsupported_grammar")
