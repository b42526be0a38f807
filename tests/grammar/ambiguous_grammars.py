"""Random ambiguous grammars, with a recogniser of their own.

The draws hold alternatives of which one begins another, parts that derive the empty text, left, right and doubled
recursion, rules that derive themselves, and terminals that begin others. `derives` tries every way to cut a text, and
infd accepts of rules with ::= exactly what they derive. The lexer of a client's Lark takes the longest terminal: each
answer is derived, but not each derived text can be the answer. Of `("a" | "ab") "b"` the lexer never finds ab.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

LITERALS = ("a", "b", "ab", "aba", "ba", "abc", "c", "é", "(", ")", "+")
CLASSES = ("ab", "abc", "bcé", "c+")
ALIKE = ("éè", "aèü€")  # with characters whose first bytes are the same
TIMES = {"?": (0, 1), "*": (0, None), "+": (1, None), "{2}": (2, 2), "{1,3}": (1, 3)}


class Text(Struct, frozen=True):
    text: str


class OneOf(Struct, frozen=True):
    characters: str


class Rule(Struct, frozen=True):
    name: str


class Row(Struct, frozen=True):
    parts: tuple[Node, ...]


class Either(Struct, frozen=True):
    options: tuple[Node, ...]


class Times(Struct, frozen=True):
    part: Node
    sign: str


Node = Text | OneOf | Rule | Row | Either | Times


class Grammar(Struct, frozen=True):
    """Rules by name; the first is the start. Each rule's first option refers to no rule."""

    rules: dict[str, Either]

    def in_gbnf(self) -> str:
        names = dict(zip(self.rules, ["root", *list(self.rules)[1:]], strict=True))
        return "\n".join(f"{names[name]} ::= {_gbnf(options, names)}" for name, options in self.rules.items())

    def in_lark(self) -> str:
        names = dict(zip(self.rules, ["start", *list(self.rules)[1:]], strict=True))
        return "\n".join(f"{names[name]}: {_lark(options, names)}" for name, options in self.rules.items())

    def derives(self, text: str) -> bool:
        """Return whether the start derives the text. Takes time cubic in its length."""
        ends: dict[tuple[str, int], set[int]] = {
            (name, at): set() for name in self.rules for at in range(len(text) + 1)
        }
        for at in reversed(range(len(text) + 1)):
            grown = True
            while grown:  # rules may refer to each other at one place
                grown = False
                for name, options in self.rules.items():
                    found = _ends(options, at, text, ends)
                    grown |= not found <= ends[name, at]
                    ends[name, at] |= found
        return len(text) in ends[next(iter(self.rules)), 0]

    def sentence(self, draw: random.Random, depth: int = 6) -> str:
        """Return a random text that the start derives."""
        return self._drawn(self.rules[next(iter(self.rules))], draw, depth)

    def _drawn(self, node: Node, draw: random.Random, depth: int) -> str:
        match node:
            case Text(text):
                return text
            case OneOf(characters):
                return draw.choice(characters)
            case Rule(name):
                options = self.rules[name]
                return self._drawn(options.options[0] if depth <= 0 else options, draw, depth - 1)
            case Row(parts):
                return "".join(self._drawn(part, draw, depth) for part in parts)
            case Either(options):
                return self._drawn(draw.choice(options), draw, depth)
            case Times(part, sign):
                least, most = TIMES[sign]
                times = draw.randint(least, least + 2 if most is None else most)
                return "".join(self._drawn(part, draw, depth - 1) for _ in range(times))


def _ends(node: Node, at: int, text: str, ends: dict[tuple[str, int], set[int]]) -> set[int]:
    """Return where texts of `node` that begin at `at` may end."""
    match node:
        case Text(literal):
            return {at + len(literal)} if text.startswith(literal, at) else set()
        case OneOf(characters):
            return {at + 1} if at < len(text) and text[at] in characters else set()
        case Rule(name):
            return ends[name, at]
        case Row(parts):
            reached = {at}
            for part in parts:
                reached = {end for start in reached for end in _ends(part, start, text, ends)}
            return reached
        case Either(options):
            return {end for option in options for end in _ends(option, at, text, ends)}
        case Times(part, sign):
            least, most = TIMES[sign]
            reached, found = {at}, {at} if least == 0 else set()
            for times in range(1, (len(text) + 2 if most is None else most) + 1):
                reached = {end for start in reached for end in _ends(part, start, text, ends)}
                if times >= least and reached <= found:
                    break
                if times >= least:
                    found |= reached
            return found


def draw_grammar(draw: random.Random, classes: Sequence[str] = CLASSES) -> Grammar:
    """Return a random grammar. classes: the classes of characters that it may have."""
    names = ["top", "one", "two", "three"][: draw.randint(1, 4)]
    return Grammar({name: _rule(draw, name, names, classes) for name in names})


def _rule(draw: random.Random, name: str, names: list[str], classes: Sequence[str]) -> Either:
    own = Rule(name)
    options: list[Node] = [_node(draw, 1, [], classes)]
    if draw.random() < 0.2:
        options.append(Text(""))
    for _ in range(draw.randint(1, 3)):
        body = _node(draw, 2, names, classes)
        options.append(
            draw.choice(
                [
                    body,
                    body,
                    Row((own, body)),
                    Row((body, own)),
                    Row((body, own, _node(draw, 1, names, classes))),
                    Row((own, own)),
                    Rule(draw.choice(names)),
                ]
            )
        )
    return Either(tuple(options))


def _node(draw: random.Random, depth: int, names: list[str], classes: Sequence[str]) -> Node:
    if depth == 0 or draw.random() < 0.25:
        kinds: list[Node] = [Text(draw.choice(LITERALS)), Text(draw.choice(LITERALS)), OneOf(draw.choice(classes))]
        return draw.choice([*kinds, Rule(draw.choice(names))] if names else kinds)
    inner = [_node(draw, depth - 1, names, classes) for _ in range(draw.randint(2, 3))]
    return draw.choice([Row(tuple(inner)), Either(tuple(inner)), Times(inner[0], draw.choice(list(TIMES)))])


def _gbnf(node: Node, names: dict[str, str]) -> str:
    return f"[{node.characters}]" if isinstance(node, OneOf) else _written(node, names, _gbnf)


def _lark(node: Node, names: dict[str, str]) -> str:
    return f"/[{node.characters}]/" if isinstance(node, OneOf) else _written(node, names, _lark)


def _written(node: Node, names: dict[str, str], write: Callable[[Node, dict[str, str]], str]) -> str:
    match node:
        case Text(text):
            return json.dumps(text, ensure_ascii=False)
        case Rule(name):
            return names[name]
        case Row(parts):
            return " ".join(write(part, names) for part in parts)
        case Either(options):
            return f"({' | '.join(write(option, names) for option in options)})"
        case Times(part, sign):
            return f"({write(part, names)}){sign}"
    raise TypeError(node)
