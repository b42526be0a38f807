"""Generate requests to extract fields of a short text as JSON, with the requested names and order."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from infd.embedded.recipe.conversation import Conversation, Expect, Pool, pick
from infd.embedded.recipe.slots import fill, listed, opening, read

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

THINKING_SHARE: Final = 0.2
INVENTED_SHARE: Final = 0.4
SCHEMA_SHARE: Final = 0.35
SYSTEM_SHARE: Final = 0.2  # fraction of conversations whose system message states the request


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of text; structured.toml explains the fields."""

    fields: dict[str, str]
    texts: list[str]


_FILE: Final[Mapping[str, Any]] = read("structured")
RECORDS: Final = msgspec.convert(_FILE["record"], tuple[Record, ...])
# Templates of a clause. An invented record draws one template and repeats it for each attribute.
_CLAUSES: Final = ("{field} is {value}", "{field}: {value}", "{field} {value}", "has the {field} {value}")
_VALUES: Final = ("int:0:999", "int:0:999", "word", "made_up", "code", "decimal", "city", "yes:on|no:off", "list:word")


def draw(rng: Random, pool: Pool) -> Conversation:
    """Draw a request for two to five fields of a text as JSON."""
    text, kinds, values = _invented(rng, pool) if rng.random() < INVENTED_SHARE else _recorded(rng, pool)
    fields = rng.sample(list(values), rng.randint(min(2, len(values)), min(5, len(values))))
    wanted = {field: values[field] for field in fields}
    if rng.random() < SCHEMA_SHARE:
        ask = pick(rng, _FILE["schema"], pool).format(schema=json.dumps(_schema(rng, fields, kinds)))
    else:
        ask = pick(rng, _FILE["ask"], pool).format(fields=_series(rng, fields))
    answer: dict[str, Any] = {"role": "assistant", "content": json.dumps(wanted, ensure_ascii=False)}
    if rng.random() < SYSTEM_SHARE:
        messages = [{"role": "system", "content": ask}, {"role": "user", "content": text}]
    else:
        frame = pick(rng, _FILE["frames"], pool)
        messages = [*opening(rng, pool), {"role": "user", "content": frame.format(ask=ask, text=text)}]
    thinking = rng.random() < THINKING_SHARE
    if thinking:
        found = ", ".join(f"{field} = {json.dumps(value, ensure_ascii=False)}" for field, value in wanted.items())
        answer["reasoning_content"] = f"The text says: {found}."
    return Conversation(kind="json", messages=[*messages, answer], thinking=thinking, expect=Expect(json=wanted))


def _recorded(rng: Random, pool: Pool) -> tuple[str, Mapping[str, str], dict[str, Any]]:
    """Fill a record's text. Return (text, kinds by field, values by field)."""
    record = rng.choice(RECORDS)
    template = pick(rng, record.texts, pool)
    values, words = {}, {}
    for field in re.findall(r"{(\w+)}", template):
        values[field], words[field] = _value(rng, record.fields[field], pool)
    return template.format(**words), record.fields, values


def _invented(rng: Random, pool: Pool) -> tuple[str, Mapping[str, str], dict[str, Any]]:
    """Invent an object with random attributes. Return (text, kinds by field, values by field)."""
    thing, kinds = listed(rng, "objects", pool), dict[str, str]()
    for _ in range(rng.randint(2, 5)):
        field = listed(rng, "attributes", pool) if rng.random() < 0.7 else listed(rng, "words", pool)
        kinds[field] = rng.choice(_VALUES)
    clause, values, clauses = rng.choice(_CLAUSES), {}, []
    for field, kind in kinds.items():
        values[field], words = _value(rng, kind, pool)
        clauses.append(clause.format(field=field, value=words))
    joined = rng.choice(("; ", "; ", "\n", " | ")).join(clauses)
    text = f"The {thing} {joined}." if clause.startswith("has") else f"{thing.capitalize()}: {joined}"
    if len(values) > 1:
        return text, kinds, values
    return _invented(rng, pool)


def _value(rng: Random, kind: str, pool: Pool) -> tuple[Any, str]:
    """Draw a value. Return (value, its wording in the text)."""
    if kind.startswith("list:"):
        items = [fill(rng, kind.removeprefix("list:"), pool) for _ in range(rng.randint(2, 3))]
        return items, f"{', '.join(map(str, items[:-1]))} and {items[-1]}"
    if kind.startswith("yes:"):
        yes, no = kind.removeprefix("yes:").split("|no:")
        verdict = rng.random() < 0.5
        return verdict, yes if verdict else no
    value = fill(rng, kind, pool)
    return value, str(value)


def _series(rng: Random, items: list[str]) -> str:
    return ", ".join(items) if len(items) < 2 or rng.random() < 0.4 else f"{', '.join(items[:-1])} and {items[-1]}"


def _schema(rng: Random, fields: list[str], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Return a JSON Schema of the fields, or at random an object with only the fields' names and types."""
    types = {field: _type(kinds[field]) for field in fields}
    if rng.random() < 0.3:
        return {field: form["type"] for field, form in types.items()}
    schema: dict[str, Any] = {"type": "object", "properties": types}
    return schema | {"required": fields} if rng.random() < 0.6 else schema


def _type(kind: str) -> dict[str, Any]:
    if kind.startswith("list:"):
        return {"type": "array", "items": _type(kind.removeprefix("list:"))}
    if kind.startswith("yes:"):
        return {"type": "boolean"}
    return {"type": "integer" if kind.startswith("int:") else "number" if kind == "decimal" else "string"}
