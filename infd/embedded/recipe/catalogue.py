"""Tools as data: signature, phrasings of requests, results, and sentences that report results.

`tools.toml` lists familiar tools; `invented.py` generates tools of the same form.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from infd.embedded.recipe.conversation import Pool
from infd.embedded.recipe.slots import fill, listed, read

if TYPE_CHECKING:
    from random import Random

# Kinds whose values are free text, which users sometimes put in quotes.
QUOTABLE: Final = {"title", "message", "query", "errand", "phrase"}
# Matches a preposition before "tomorrow" and similar words. It is removed, because "on tomorrow" is not English.
_WITHOUT_ON: Final = re.compile(r"\b(?:on|for) (?=(?:tomorrow|today|next|this)\b)")


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool; tools.toml explains the fields."""

    name: str
    domain: str
    about: str
    ask: list[str]
    say: list[str]
    needs: dict[str, str] = {}
    may: dict[str, str] = {}
    gives: dict[str, str] = {}
    held_out: bool = False


class Use(Struct, frozen=True):
    """One call of a tool: request, arguments, result, and the sentence that reports the result."""

    tool: Tool
    question: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    sentence: str
    facts: list[str]  # values of arguments and result that the sentence contains


_FILE: Final = read("tools")
CATALOGUE: Final = msgspec.convert(_FILE["tool"], tuple[Tool, ...])
COMMANDS: Final = frozenset(_FILE["commands"].split())


def listed_tools(pool: Pool) -> list[Tool]:
    """Return the tools of `CATALOGUE` that belong to a pool."""
    return [tool for tool in CATALOGUE if tool.held_out == (pool is Pool.HELD_OUT)]


def blanks(template: str) -> set[str]:
    """Return the names of the template's blanks."""
    return set(re.findall(r"{(\w+)}", template))


def use(rng: Random, tool: Tool, pool: Pool) -> Use:
    """Draw one call of `tool`, and fill all blanks."""
    template, _, implied = rng.choice(tool.ask).partition(" => ")
    kinds = {name: kind.partition(";")[0] for name, kind in (tool.needs | tool.may).items()}
    arguments: dict[str, Any] = json.loads(implied) if implied else {}
    words = {}
    for blank in sorted(blanks(template)):  # sorted, because a set's order differs between processes
        value = _fresh(rng, kinds[blank], pool, arguments)
        arguments[blank] = value
        words[blank] = _quoted(rng, template, blank, value) if kinds[blank] in QUOTABLE else value
    result = {field: fill(rng, kind, pool) for field, kind in tool.gives.items()}
    closing = rng.choice(tool.say)
    # If an argument and a field of the result have the same name, the sentence reports the field.
    values = arguments | result
    return Use(
        tool=tool,
        question=_WITHOUT_ON.sub("", template.format(**words)),
        arguments={name: arguments[name] for name in kinds if name in arguments},
        result=result,
        sentence=_WITHOUT_ON.sub("", closing.format(**values)),
        facts=[str(values[blank]) for blank in sorted(blanks(closing))],
    )


def _fresh(rng: Random, kind: str, pool: Pool, used: dict[str, Any]) -> Any:
    # Draws until the value differs from the other arguments: no trip from a city to itself.
    while (value := fill(rng, kind, pool)) in used.values() and not isinstance(value, bool):
        pass
    return value


def _quoted(rng: Random, template: str, blank: str, value: str) -> str:
    if f"'{{{blank}}}'" in template or rng.random() > 0.12:
        return value
    return rng.choice(("'{}'", '"{}"')).format(value)


def varied(rng: Random, question: str, pool: Pool) -> str:
    """Return a request as it is, or at random with politeness added or the final punctuation removed."""
    first, _, rest = question.partition(" ")
    if first.lower() in COMMANDS and question.endswith(".") and rng.random() < 0.3:
        return listed(rng, "manners", pool).format(do=f"{first.lower()} {rest[:-1]}")
    chance = rng.random()
    if chance < 0.06:
        return question.rstrip(".?")
    if chance < 0.1:
        return f"{rng.choice(('Hello!', 'Hi!', 'Hey!'))} {question}"
    if chance < 0.14 and question[-1] in ".?":
        return f"{question} Thanks."
    return question


def signature(rng: Random, tool: Tool, name: str) -> dict[str, Any]:
    """Return a tool's definition as in API requests. At random, parameters without a description get one too."""
    described, closed = rng.random() < 0.2, rng.random() < 0.1
    properties = {}
    for parameter, spec in (tool.needs | tool.may).items():
        kind, _, about = spec.partition(";")
        form: dict[str, Any] = {"type": _type(kind)}
        if "|" in kind:
            form["enum"] = kind.split("|")
        if about or described:
            form["description"] = about.strip() or parameter.replace("_", " ").capitalize()
        properties[parameter] = form
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(tool.needs)}
    if closed:
        parameters["additionalProperties"] = False
    return {
        "type": "function",
        "function": {"name": name, "description": tool.about, "parameters": parameters},
    }


def _type(kind: str) -> str:
    if kind.startswith("int:"):
        return "integer"
    return {"bool": "boolean", "decimal": "number"}.get(kind, "string")


def spelled(rng: Random, tool: Tool) -> str:
    """Return the tool's name, usually in snake_case, sometimes in camelCase."""
    if rng.random() > 0.12:
        return tool.name
    head, *tail = tool.name.split("_")
    return head + "".join(word.capitalize() for word in tail)
