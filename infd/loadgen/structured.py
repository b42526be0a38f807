"""Judge answers that had to be JSON or fit a JSON schema."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import msgspec

from infd.loadgen.datasets.call import DatasetError

if TYPE_CHECKING:
    from collections.abc import Mapping

CHECKED: Final = "schema" if find_spec("jsonschema") is not None else "json"
"""Whether answers are checked against their schemas, which needs the package jsonschema, or only for JSON."""


def wanted(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the schema that a request's answer must fit, {} for any JSON; None: the answer is free.

    Raises DatasetError for a schema by which no answer can be judged.
    """
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_object":
        return {}
    if isinstance(form, dict) and form.get("type") == "json_schema":
        named = form.get("json_schema")
        found = named.get("schema", {}) if isinstance(named, dict) else {}
    else:
        outputs = body.get("structured_outputs")
        found = outputs.get("json") if isinstance(outputs, dict) else None
    if isinstance(found, str):
        try:
            found = msgspec.json.decode(found)
        except msgspec.MsgspecError as error:
            raise DatasetError(f"structured_outputs.json: not JSON: {error}") from None
    if not isinstance(found, dict):
        return None
    if CHECKED == "schema":
        try:
            import_module("jsonschema.validators").validator_for(found).check_schema(found)
        except import_module("jsonschema.exceptions").SchemaError as error:
            raise DatasetError(f"a request's schema is not valid: {error.json_path}: {error.message}") from None
    return found


def fits(text: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a text is JSON, and fits a schema if CHECKED says so."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    if schema and CHECKED == "schema":
        validators = import_module("jsonschema.validators")
        return bool(validators.validator_for(schema)(schema).is_valid(value))
    return True
