"""Request fields of OpenAI, vLLM, llama.cpp and SGLang that constrain the generated text."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Raw, Struct

from infd.http.schema.unsupported import ABSENT, UnsupportedField

Text = Annotated[str, Meta(min_length=1)]
Options = Annotated[list[str], Meta(min_length=1)]


class NamedSchema(Struct, kw_only=True):
    """The `json_schema` of a response_format. infd enforces the schema exactly, whether or not `strict` is set."""

    name: str | None = None
    description: str | None = None
    schema: Raw = ABSENT
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    """The field `response_format`.

    schema                        JSON schema that llama.cpp's clients send with type json_object
    structures, triggers, format  fields of type structural_tag
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: NamedSchema | None = None
    schema: Raw = ABSENT
    structures: Raw = ABSENT
    triggers: Raw = ABSENT
    format: Raw = ABSENT


class StructuredOutputs(Struct, kw_only=True):
    """The field `structured_outputs`: exactly one constraint, and options. JSON may be sent within a string.

    backend  vLLM: the library that enforces the constraint; in infd the operator chooses the library (grammar.engine)
    """

    json: Raw = ABSENT
    regex: Text | None = None
    choice: Options | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Raw = ABSENT
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # vLLM: use no second grammar library; infd never falls back
    backend: UnsupportedField = ABSENT
    disable_additional_properties: UnsupportedField = ABSENT
    whitespace_pattern: UnsupportedField = ABSENT

    SUPPORTED: ClassVar[frozenset[str]] = frozenset({"json", "structural_tag"})
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "backend": ("auto",),
        "disable_additional_properties": (False,),
    }
