"""Generate invented tools. Requests for a tool repeat the words of its name and parameters.

Clients offer tools that were not in training. From invented tools the model learns
to choose a tool by comparing the question with names and descriptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

from infd.embedded.recipe.catalogue import CATALOGUE, Tool
from infd.embedded.recipe.slots import listed, made_up

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from infd.embedded.recipe.conversation import Pool

# Possible names of the parameter that identifies a thing, by the kind of the parameter's values.
KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "code": ("id", "{thing}_id", "{thing}", "number", "code"),
    "int:1:9999": ("id", "{thing}_id", "number", "{thing}_number"),
    "made_up": ("name", "{thing}_name", "{thing}", "target"),
    "word": ("name", "{thing}", "{thing}_name", "label"),
    "host": ("name", "{thing}", "{thing}_name", "target"),
    "title": ("title", "name", "{thing}_name", "{thing}"),
}
VALUES: Final = (
    "int:0:100",
    "int:1:5000",
    "decimal",
    "word",
    "made_up",
    "low|medium|high",
    "red|green|blue",
    "auto|manual",
)
ORIGINS: Final = {
    "city": ("city", "place", "location"),
    "person": ("person", "owner", "user"),
    "company": ("company", "client"),
}


class Nouns(Struct, frozen=True):
    """The object of a tool's action, such as a pump, and the parameter that identifies the object."""

    thing: str
    key: str
    key_kind: str


def invent(rng: Random, pool: Pool, count: int) -> list[Tool]:
    """Generate tools with distinct names. Several tools share a `thing`, so that the model must read whole names."""
    nouns = [_nouns(rng, pool)]
    tools: dict[str, Tool] = {}
    taken = {tool.name for tool in CATALOGUE}
    while len(tools) < count:
        if rng.random() < 0.5:
            nouns.append(_nouns(rng, pool))
        form = rng.choice(_FORMS)
        tool = form(rng, pool, rng.choice(nouns))
        # "set" and "change" mean the same in a request, so at most one tool sets a given attribute. Only the verbs of
        # _doing and _handing differ in meaning.
        meaning = tool.name if form in {_doing, _handing} else f"{form.__name__} {tool.name.partition('_')[2]}"
        if tool.name not in taken:
            tools.setdefault(meaning, tool)
    return list({tool.name: tool for tool in tools.values()}.values())


def _nouns(rng: Random, pool: Pool) -> Nouns:
    chance = rng.random()
    if chance < 0.5:
        thing = listed(rng, "objects", pool)
    elif chance < 0.85:
        thing = listed(rng, "words", pool)
    else:
        thing = made_up(rng, pool)
    if rng.random() < 0.15:
        thing = f"{listed(rng, 'words', pool)} {thing}"
    kind = rng.choice(list(KEYS))
    return Nouns(thing, rng.choice(KEYS[kind]).format(thing=thing.replace(" ", "_")), kind)


def _attribute(rng: Random, pool: Pool) -> str:
    word = listed(rng, "attributes", pool) if rng.random() < 0.75 else listed(rng, "words", pool)
    return f"{listed(rng, 'words', pool)} {word}" if rng.random() < 0.15 else word


def _tool(
    verb: str,
    nouns: Nouns,
    about: str,
    ask: list[str],
    say: str,
    *,
    needs: dict[str, str],
    may: dict[str, str] | None = None,
    gives: dict[str, str] | None = None,
) -> Tool:
    """Build a tool.

    In phrases, THING stands for the thing's name, and KEY for the blank of the parameter that identifies a thing.
    """

    def worded(phrase: str) -> str:
        phrase = phrase.replace("THING", nouns.thing).replace("KEY", f"{{{nouns.key}}}")
        return phrase[:1].upper() + phrase[1:]

    return Tool(
        name=verb.replace(" ", "_"),
        domain=f"invented: {nouns.thing}",
        about=about,
        ask=[worded(phrase) for phrase in ask],
        say=[worded(say)],
        needs=needs,
        may=may or {},
        gives=gives or {},
    )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' and not noun.startswith(('us', 'uni')) else 'a'} {noun}"


def _plural(noun: str) -> str:
    if noun.endswith(("s", "x", "sh", "ch")):
        return f"{noun}es"
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{noun}s"


def _reading(rng: Random, pool: Pool, nouns: Nouns) -> Tool:
    attribute = _attribute(rng, pool)
    verb = rng.choice(("get", "read", "show", "fetch"))
    field = attribute.replace(" ", "_")
    field = field if field != nouns.key else "value"
    return _tool(
        f"{verb} {nouns.thing} {attribute}",
        nouns,
        f"{verb.capitalize()} the {attribute} of {_a(nouns.thing)}",
        [
            f"What is the {attribute} of THING KEY?",
            f"Tell me the {attribute} of the THING KEY.",
            f"{verb} the {attribute} of THING KEY.",
            f"Which {attribute} does the THING KEY have?",
            f"I want to know the {attribute} of THING KEY.",
        ],
        f"The {attribute} of THING KEY is {{{field}}}.",
        needs={nouns.key: nouns.key_kind},
        gives={field: rng.choice(VALUES)},
    )


def _writing(rng: Random, pool: Pool, nouns: Nouns) -> Tool:
    attribute = _attribute(rng, pool)
    verb = rng.choice(("set", "change", "update", "adjust"))
    value = rng.choice(("value", attribute.replace(" ", "_"), f"new_{attribute}".replace(" ", "_")))
    value = value if value != nouns.key else "value"
    return _tool(
        f"{verb} {nouns.thing} {attribute}",
        nouns,
        f"{verb.capitalize()} the {attribute} of {_a(nouns.thing)}",
        [
            f"{verb} the {attribute} of THING KEY to {{{value}}}.",
            f"Set the {attribute} of the THING KEY to {{{value}}}.",
            f"Change the {attribute} of THING KEY to {{{value}}}.",
            f"Make {{{value}}} the {attribute} of THING KEY.",
            f"THING KEY should have the {attribute} {{{value}}}.",
        ],
        f"The {attribute} of THING KEY is now {{{value}}}.",
        needs={nouns.key: nouns.key_kind, value: rng.choice(VALUES)},
    )


def _doing(rng: Random, pool: Pool, nouns: Nouns) -> Tool:
    verb = listed(rng, "verbs", pool)
    ask = [
        f"{verb} THING KEY.",
        f"{verb} the THING KEY.",
        f"I want to {verb} the THING KEY.",
        f"The THING KEY: {verb} it.",
        f"We have to {verb} THING KEY.",
    ]
    may = {}
    extra = rng.choice(("nothing", "nothing", "flag", "time", "note"))
    if extra == "flag":
        flag = listed(rng, "flags", pool)
        may[flag] = "bool"
        ask += [f'{verb} the THING KEY with {flag.replace("_", " ")} on. => {{"{flag}": true}}'] * 2
    elif extra == "time":
        may["time"] = "clock"
        ask += [f"{verb} the THING KEY at {{time}}.", f"At {{time}}, {verb} THING KEY."]
    elif extra == "note":
        may["note"] = "phrase"
        ask += [f"{verb} the THING KEY with the note {{note}}."] * 2
    return _tool(
        f"{verb} {nouns.thing}",
        nouns,
        f"{verb.capitalize()} {_a(nouns.thing)}",
        ask,
        "That is done for THING KEY.",
        needs={nouns.key: nouns.key_kind},
        may=may,
    )


def _listing(rng: Random, pool: Pool, nouns: Nouns) -> Tool:
    kind = rng.choice(list(ORIGINS))
    origin = rng.choice(ORIGINS[kind])
    verb = rng.choice(("list", "find", "search"))
    of = "in" if kind == "city" else "of"
    things = _plural(nouns.thing)
    return _tool(
        f"{verb} {things}",
        nouns,
        f"{verb.capitalize()} the {things} {of} {_a(origin)}",
        [
            f"{verb} the {things} {of} {{{origin}}}.",
            f"Which {things} are there {of} {{{origin}}}?",
            f"Show me the {things} {of} {{{origin}}}.",
            f"{verb} {{limit}} {things} {of} {{{origin}}}.",
            f"Show me at most {{limit}} {things} {of} {{{origin}}}.",
        ],
        f"There are {{count}} {things}; the first is {{first}}.",
        needs={origin: kind},
        may={"limit": "int:2:50"},
        gives={"count": "int:2:90", "first": nouns.key_kind},
    )


def _handing(rng: Random, pool: Pool, nouns: Nouns) -> Tool:
    verb = listed(rng, "transfers", pool)
    to = rng.choice(tuple(name for name in ("recipient", "person", "to", "user") if name != nouns.key))
    return _tool(
        f"{verb} {nouns.thing}",
        nouns,
        f"{verb.capitalize()} {_a(nouns.thing)} to a person",
        [
            f"{verb} THING KEY to {{{to}}}.",
            f"{verb} the THING KEY to {{{to}}}.",
            f"I want to {verb} THING KEY to {{{to}}}.",
            f"{{{to}}} wants the THING KEY; {verb} it.",
        ],
        f"THING KEY goes to {{{to}}}.",
        needs={nouns.key: nouns.key_kind, to: rng.choice(("person", "full_name"))},
    )


def _making(rng: Random, pool: Pool, nouns: Nouns) -> Tool:
    verb = rng.choice(("create", "add", "register", "new"))
    attribute = listed(rng, "attributes", pool)
    field = attribute if attribute != nouns.key else "value"
    word = "create" if verb == "new" else verb
    return _tool(
        f"{verb} {nouns.thing}",
        nouns,
        f"{word.capitalize()} {_a(nouns.thing)}",
        [
            f"{word} {_a(nouns.thing)} KEY.",
            f"{word} a new THING KEY with {attribute} {{{field}}}.",
            f"I need a new THING KEY, {attribute} {{{field}}}.",
            f"{word} the THING KEY.",
            f"{word} {_a(nouns.thing)} called KEY with the {attribute} {{{field}}}.",
        ],
        "The THING KEY is there.",
        needs={nouns.key: nouns.key_kind},
        may={field: rng.choice(VALUES)},
    )


_FORMS: Final[tuple[Callable[[Random, Pool, Nouns], Tool], ...]] = (
    _reading,
    _reading,
    _writing,
    _writing,
    _doing,
    _doing,
    _listing,
    _handing,
    _making,
)
