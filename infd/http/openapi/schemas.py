"""Convert Structs to the JSON schemas of an OpenAPI document.

`msgspec.json.schema_components` cannot encode a default of type Raw, and knows neither which fields infd refuses nor
which it ignores; this module reads the same `msgspec.inspect` types.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec import inspect

from infd.http.schema.unsupported import ABSENT

if TYPE_CHECKING:
    from collections.abc import Iterable

Schema = dict[str, Any]

_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}


class Components:
    """The schemas of all Structs that the added types contain, by name."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        self._names: dict[type, str] = {}

    def schema(self, type_: Any) -> Schema:
        """Return the schema of a type; its Structs become entries of `schemas`."""
        return self._schema(inspect.type_info(type_))

    def any_of(self, types: Iterable[Any]) -> Schema:
        options = [self.schema(type_) for type_ in types]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _schema(self, kind: inspect.Type) -> Schema:
        match kind:
            case inspect.Metadata(type=inner):
                return self._schema(inner)
            case inspect.NoneType():
                return {"type": "null"}
            case inspect.BoolType():
                return {"type": "boolean"}
            case inspect.IntType() | inspect.FloatType():
                bounds = {_BOUNDS[name]: value for name in _BOUNDS if (value := getattr(kind, name)) is not None}
                return {"type": "integer" if isinstance(kind, inspect.IntType) else "number", **bounds}
            case inspect.StrType(min_length=least, max_length=most, pattern=pattern):
                found: Schema = {"type": "string", **_present(minLength=least, maxLength=most)}
                # Python's \Z is the end of the text; JSON schema's dialect writes it as $.
                return found if pattern is None else {**found, "pattern": pattern.replace(r"\Z", "$")}
            case inspect.BytesType():
                return {"type": "string", "contentEncoding": "base64"}
            case inspect.LiteralType(values=values):
                return {"enum": list(values)}
            case inspect.ListType(item_type=item, min_length=least, max_length=most):
                return {"type": "array", "items": self._schema(item), **_present(minItems=least, maxItems=most)}
            case inspect.DictType(key_type=key, value_type=value, max_length=most):
                found = {"type": "object", "additionalProperties": self._schema(value), **_present(maxProperties=most)}
                return found if isinstance(key, inspect.StrType) else {**found, "propertyNames": {"pattern": r"^\d+$"}}
            case inspect.UnionType(types=options):
                return {"anyOf": [self._schema(option) for option in options]}
            case inspect.StructType():
                return {"$ref": f"#/components/schemas/{self._struct(kind)}"}
        assert isinstance(kind, inspect.AnyType | inspect.RawType), f"no JSON schema for {kind}"
        return {}

    def _struct(self, kind: inspect.StructType) -> str:
        cls = kind.cls
        if cls in self._names:
            return self._names[cls]
        name = cls.__name__
        if name in self.schemas:
            name = f"{cls.__module__.rpartition('.')[2]}.{name}"
        self._names[cls] = name
        found = self.schemas[name] = {"type": "object"}
        if text := _description(cls):
            found["description"] = text
        properties: dict[str, Schema] = {}
        required = [field.encode_name for field in kind.fields if field.required]
        if kind.tag_field is not None:
            properties[kind.tag_field] = {"const": kind.tag}
            required.insert(0, kind.tag_field)
        for field in kind.fields:
            properties[field.encode_name] = self._property(cls, field)
        found["properties"] = properties
        if required:
            found["required"] = required
        if kind.forbid_unknown_fields:
            found["additionalProperties"] = False
        return name

    def _property(self, cls: Any, field: inspect.Field) -> Schema:
        name = field.encode_name
        if field.default is ABSENT and name not in getattr(cls, "SUPPORTED", ()) and hasattr(cls, "NEUTRAL"):
            values = [None, *cls.NEUTRAL.get(name, ())]
            return {"enum": values, "description": "Not served: other values are refused."}
        found = self._schema(field.type)
        if name in getattr(cls, "IGNORED", ()):
            found["description"] = "Ignored: it cannot change an answer."
        elif other := getattr(cls, "ALIASES", {}).get(name):
            found["description"] = f"Another name of {other}."
        if isinstance(field.default, bool | int | float | str):
            found["default"] = field.default
        return found


def _present(**bounds: int | None) -> Schema:
    return {name: value for name, value in bounds.items() if value is not None}


def _description(cls: type) -> str:
    return re.sub(r"[ \t]+", " ", (cls.__doc__ or "").strip())
