"""Random constraints of every kind, by seed, each with a judge of answers that shares no code with the engine.

The judges: the jsonschema package for schemas, `re` for regular expressions, the lark package for Lark and for rules
with `::=`, a recogniser of the tests for ambiguous grammars, and a reader of structural tags made of these.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jsonschema
import lark
from msgspec import Struct

from infd.constraint import Choice, Constraint, Ebnf, JsonObject, JsonSchema, Lark, Regex, StructuralTag
from tests.grammar.ambiguous_grammars import draw_grammar
from tests.grammar.test_json_schema import DRAFTS, real

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

NAMES = ("a", "b", "name", "kind", "größe", 'q"\\', "x-y", "items", "")
WORDS = ("", "a", "ab", "abc", "yes", "no", "é", "日本", '"', "\\", "a b", " x", "\n", "<", "0")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "uri", "duration")


class Case(Struct, frozen=True):
    """A constraint, and a function that raises for an answer that breaks it."""

    constraint: Constraint
    judge: Callable[[str], None]
    words: tuple[bytes, ...] = ()  # that free text may have to contain
    alike: Constraint | None = None  # a constraint of the same texts that both engines keep
    tokens: int = 500  # of an answer at most, because the judge takes cubic time


def draw_case(draw: random.Random) -> Case:
    """Return a case of a random kind."""
    kinds = {
        _schema: 45,
        _real: 15,
        _regex: 12,
        _choice: 6,
        _lark: 8,
        _ebnf: 8,
        _ambiguous: 8,
        _structural: 6,
        _object: 2,
    }
    (make,) = draw.choices(list(kinds), list(kinds.values()))
    return make(draw)


# Schemas


def _schema(draw: random.Random) -> Case:
    schema = random_schema(draw, draw.choice((1, 2, 2, 3)), [])
    defined = draw.random() < 0.25
    if defined:
        names = ["node", "leaf"]
        schema = random_schema(draw, 2, names)
        if isinstance(schema, dict):
            schema["$defs"] = {name: random_schema(draw, 2, names) for name in names}
    if isinstance(schema, dict) and not defined and draw.random() < 0.3:
        schema = {"$schema": draw.choice(list(DRAFTS.values())), **schema}
    return _of_schema(schema, whitespace=draw.random() < 0.7)


def _real(draw: random.Random) -> Case:
    return _of_schema(draw.choice(real())["schema"], whitespace=draw.random() < 0.5)


def _object(draw: random.Random) -> Case:
    def judge(answer: str) -> None:
        assert isinstance(json.loads(answer), dict)

    return Case(JsonObject(whitespace=draw.random() < 0.5), judge)


def _of_schema(schema: Any, *, whitespace: bool) -> Case:
    constraint = JsonSchema(json.dumps(schema), whitespace=whitespace)
    return Case(constraint, lambda answer: validate(schema, answer, whitespace))


def validate(schema: Any, answer: str, whitespace: bool = True) -> None:
    """Raise if an answer is no JSON document, or breaks the schema.

    A key that the schema does not list may repeat. Parsers then keep the first value or the last; either must do.
    """
    documents = [
        json.loads(answer, parse_constant=_no_constant, object_pairs_hook=keep) for keep in (dict, _first_of_each)
    ]
    if not whitespace:
        assert not re.search(r"\s", re.sub(r'"(?:\\.|[^"\\])*"', '""', answer)), "white space"
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind = jsonschema.validators.extend(kind, {"multipleOf": partial(_multiple_of, kind.VALIDATORS["multipleOf"])})
    for document in documents[: 1 + (repr(documents[0]) != repr(documents[1]))]:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(document)


def _multiple_of(known: Any, validator: Any, step: float, instance: Any, schema: Any) -> Iterator[Any]:
    """Check multipleOf, also of an integer too large for a float, for which the package's check overflows."""
    if not isinstance(instance, int) or abs(instance) < 10**300:
        yield from known(validator, step, instance, schema) or ()
    elif Fraction(instance) % Fraction(repr(step)):
        yield jsonschema.ValidationError(f"{instance} is not a multiple of {step}")


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: dict(reversed(pairs))[key] for key, _ in pairs}


def _no_constant(name: str) -> None:
    raise ValueError(name)


def value(draw: random.Random) -> Any:
    """Return a small JSON value."""
    return draw.choice([None, True, False, 0, 1, -3, 2.5, 10**12, *WORDS, [], {}, [1, "a"], {"a": 1}])


def random_schema(draw: random.Random, depth: int, defined: list[str]) -> Any:
    """Return a schema.

    depth    nesting left
    defined  names of $defs that it may refer to
    """
    if defined and draw.random() < 0.3:
        return {"$ref": f"#/$defs/{draw.choice(defined)}"}
    if depth == 0 or draw.random() < 0.2:
        return _leaf(draw)
    inner = lambda: random_schema(draw, depth - 1, defined)  # noqa: E731
    kinds = {_object_schema: 10, _array_schema: 6, _leaf_schema: 3, _combined: 5}
    (make,) = draw.choices(list(kinds), list(kinds.values()))
    return make(draw, inner)


def _leaf_schema(draw: random.Random, _: Callable[[], Any]) -> Any:
    return _leaf(draw)


def _leaf(draw: random.Random) -> Any:
    match draw.randrange(9):
        case 0:
            return {"type": draw.choice(TYPES)}
        case 1:
            return {"type": draw.sample(TYPES, draw.randint(1, 3))}
        case 2:
            return {"enum": [value(draw) for _ in range(draw.randint(1, 5))]}
        case 3:
            return {"const": value(draw)}
        case 4 | 5:
            schema: dict[str, Any] = {"type": draw.choice(["integer", "number"])}
            low = draw.choice([-1000, -7, 0, 1, 3, 0.5, 99])
            some = {
                "minimum": low,
                "exclusiveMinimum": low - 1,
                "maximum": low + draw.choice([0, 1, 5, 1000]),
                "exclusiveMaximum": low + draw.choice([2, 3.5, 100]),
                "multipleOf": draw.choice([1, 2, 5, 0.5, 0.25]),
            }
            return schema | {name: some[name] for name in draw.sample(list(some), draw.randint(0, 3))}
        case 6:
            return {"type": "string", "format": draw.choice(FORMATS)}
        case 7:
            return {
                "type": "string",
                "pattern": draw.choice(["^"] * 7 + [""]) + pattern(draw, 2) + draw.choice(["$", ""]),
            }
        case _:
            least = draw.randint(0, 4)
            some = {"minLength": least, "maxLength": least + draw.randint(0, 6)}
            return {"type": "string"} | {name: some[name] for name in draw.sample(list(some), draw.randint(0, 2))}


def _object_schema(draw: random.Random, inner: Callable[[], Any]) -> Any:
    names = draw.sample(NAMES, draw.randint(0, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: inner() for name in names}}
    schema["required"] = [name for name in names if draw.random() < 0.6]
    others: dict[str, Callable[[], Any]] = {
        "additionalProperties": lambda: draw.choice([False, False, True, inner()]),
        "patternProperties": lambda: {draw.choice(["^a", "^x-", "[0-9]$", "k"]): inner()},
        "propertyNames": lambda: draw.choice([{"enum": [*names, "z"]}, {"pattern": "^[a-z]"}, {"maxLength": 5}]),
        "minProperties": lambda: draw.randint(0, 2),
        "maxProperties": lambda: draw.randint(1, 5),
        "dependentRequired": lambda: {draw.choice(NAMES): draw.sample(NAMES, 1)},
        "dependentSchemas": lambda: {draw.choice(NAMES): inner()},
        "unevaluatedProperties": lambda: False,
    }
    chosen = draw.choices(list(others), [8, 2, 1, 1, 1, 1, 1, 1], k=draw.choice([0, 0, 1, 1, 2]))
    return schema | {name: others[name]() for name in chosen}


def _array_schema(draw: random.Random, inner: Callable[[], Any]) -> Any:
    least = draw.randint(0, 2)
    others: dict[str, Callable[[], Any]] = {
        "items": inner,
        "minItems": lambda: least,
        "maxItems": lambda: least + draw.randint(0, 3),
        "prefixItems": lambda: [inner() for _ in range(draw.randint(1, 2))],
        "contains": inner,
        "uniqueItems": lambda: True,
    }
    chosen = {name for name in others if draw.random() < (0.08 if name in ("contains", "uniqueItems") else 0.5)}
    if "uniqueItems" in chosen:
        return {"type": "array", "items": {"enum": ["a", "b", 1, None][: draw.randint(1, 4)]}, "uniqueItems": True}
    return {"type": "array"} | {name: others[name]() for name in sorted(chosen)}


def _combined(draw: random.Random, inner: Callable[[], Any]) -> Any:
    match draw.randrange(6):
        case 0 | 1:
            return {"anyOf": [inner() for _ in range(draw.randint(1, 3))]}
        case 2:
            kinds = [("type", each) for each in draw.sample(TYPES, 3)]
            return {"oneOf": [{name: each} for name, each in kinds]}
        case 3:
            return {
                "oneOf": [
                    {"type": "object", "properties": {"kind": {"const": kind}, "a": inner()}, "required": ["kind"]}
                    for kind in ("x", "y")
                ]
            }
        case 4:
            return {"allOf": [{"type": "object", "properties": {name: inner()}, "required": [name]} for name in "ab"]}
        case _:
            condition = {"properties": {"a": {"const": 1}}, "required": ["a"]}
            return {"type": "object", "if": condition, "then": {"required": ["b"]}, "properties": {"b": inner()}}


# Regular expressions and choices


def pattern(draw: random.Random, depth: int) -> str:
    """Return a regular expression that Python's `re` reads as Rust's regex crate does."""
    if depth == 0 or draw.random() < 0.3:
        atoms = ["a", "xy", "[a-f]", "[^a-z]", "[0-9]", r"\.", "-", "é", "/", r"\/", "_", "[A-Z]", "[^,]", "日", "(b|)"]
        return draw.choice(atoms)
    match draw.randrange(4):
        case 0:
            return pattern(draw, depth - 1) + pattern(draw, depth - 1)
        case 1:
            return f"({pattern(draw, depth - 1)}|{pattern(draw, depth - 1)})"
        case 2:
            return f"(?:{pattern(draw, depth - 1)}){draw.choice(['*', '+', '?', '{2}', '{1,3}', '{2,}'])}"
        case _:
            return "".join(pattern(draw, depth - 1) for _ in range(3))


def _regex(draw: random.Random) -> Case:
    expression = pattern(draw, draw.randint(1, 4))

    def judge(answer: str) -> None:
        assert re.fullmatch(expression, answer), "no match"

    return Case(Regex(expression), judge)


def _choice(draw: random.Random) -> Case:
    options = tuple("".join(draw.choices(WORDS, k=draw.randint(1, 3))) for _ in range(draw.choice([1, 2, 5, 40])))

    def judge(answer: str) -> None:
        assert answer in options, "no option"

    return Case(Choice(options), judge)


# Grammars: rules over literals and classes of characters, with recursion inside brackets


def _expression(draw: random.Random, depth: int, rules: list[str]) -> tuple[str, str]:
    """Return an expression that derives no empty text, in Lark and in GBNF."""
    if depth == 0 or draw.random() < 0.2:
        if rules and draw.random() < 0.5:
            rule = draw.choice(rules)
            return rule, rule
        if draw.random() < 0.5:
            literal = json.dumps(draw.choice(["a", "ab", "x=", ";", "no", "été", "(", "-> "]), ensure_ascii=False)
            return literal, literal
        characters = draw.choice(["[a-c]", "[0-9]", '[^a-z"%~|!]', "[A-Z_]", "[é-ü]"])
        return f"/{characters}/", characters
    parts = [_expression(draw, depth - 1, rules) for _ in range(draw.randint(2, 3))]
    match draw.randrange(3):
        case 0:
            return tuple(f"({' | '.join(each)})" for each in zip(*parts, strict=True))  # type: ignore[return-value]
        case 1:
            # A mark of its own begins each repetition: the judge takes exponential time where repetitions overlap.
            times, mark = draw.choice(["?", "*"]), draw.choice(['"%"', '"~"', '"|"'])
            (lark_first, gbnf_first), *others = parts
            rest = tuple(" ".join(each) for each in zip(*others, strict=True))
            return f"({mark} {lark_first}){times} {rest[0]}", f"({mark} {gbnf_first}){times} {rest[1]}"
        case _:
            return tuple(f'("!" {" ".join(each)})+' for each in zip(*parts, strict=True))  # type: ignore[return-value]


def _rules(draw: random.Random) -> tuple[list[str], list[str]]:
    """Return the lines of a grammar, in Lark and in GBNF."""
    names = ["one", "two", "three"][: draw.randint(0, 3)]
    in_lark, in_gbnf = [], []
    for index, name in enumerate(["start", *names]):
        lark_side, gbnf_side = _expression(draw, 2, names[index:])
        if draw.random() < 0.3:
            root = "root" if name == "start" else name
            lark_side, gbnf_side = f'({lark_side}) | "[" {name} "]"', f'({gbnf_side}) | "[" {root} "]"'
        in_lark.append(f"{name}: {lark_side}")
        in_gbnf.append(f"{'root' if name == 'start' else name} ::= {gbnf_side}")
    return in_lark, in_gbnf


def _judge_of(grammar: str) -> Callable[[str], None]:
    @cache
    def parser() -> lark.Lark:
        return lark.Lark(grammar, parser="earley", lexer="dynamic_complete")

    return lambda answer: parser().parse(answer) and None


def _lark(draw: random.Random) -> Case:
    in_lark, in_gbnf = _rules(draw)
    if draw.random() < 0.4:
        in_gbnf[0] = f"root ::= ({in_gbnf[0].removeprefix('root ::= ')}) word"
        in_gbnf += ["word ::= [a-z]+ | [0-9]+"]
        in_lark[0] = f"start: ({in_lark[0].removeprefix('start: ')}) WORD"
        in_lark += ["WORD: /[a-z]+/ | NUMBER", "NUMBER: /[0-9]+/"]
        if draw.random() < 0.5:
            in_lark.append("%ignore / +/")
            in_gbnf = [_spaced(line) for line in in_gbnf]
    grammar, alike = "\n".join(in_lark), Ebnf("\n".join(in_gbnf))
    return Case(Lark(grammar), _judge_of(grammar), tokens=30, alike=alike)


def _spaced(rule: str) -> str:
    """Return a rule in GBNF that admits spaces after each terminal."""
    if rule.startswith("word ::="):
        return 'word ::= ([a-z]+ | [0-9]+) " "*'
    name, body = rule.split(" ::= ")
    spaced = re.sub(r'("(?:[^"\\]|\\.)*"|\[[^\]]*\])', r'(\1 " "*)', body)
    return f"{name} ::= {spaced}"


def _ebnf(draw: random.Random) -> Case:
    in_lark, in_gbnf = _rules(draw)
    return Case(Ebnf("\n".join(in_gbnf)), _judge_of("\n".join(in_lark)), tokens=30)


def _ambiguous(draw: random.Random) -> Case:
    grammar = draw_grammar(draw)

    def judge(answer: str) -> None:
        assert grammar.derives(answer), "not derived"

    alike = Ebnf(grammar.in_gbnf())
    return Case(alike if draw.random() < 0.5 else Lark(grammar.in_lark()), judge, tokens=40, alike=alike)


# Structural tags


def _structural(draw: random.Random) -> Case:
    contents: list[tuple[Any, Any]] = []
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            schema = _object_schema(draw, lambda: _leaf(draw))
            contents.append(({"type": "json_schema", "json_schema": schema}, schema))
        else:
            expression = draw.choice(["[0-9]+", "[a-f]{2,4}", "(é|日)*"])
            contents.append(({"type": "regex", "pattern": expression}, re.compile(expression)))
    trigger = draw.choice(["<f=", "[[", "日:"])
    tags = [
        ({"type": "tag", "begin": f"{trigger}{index}>", "content": written, "end": "</f>"}, content)
        for index, (written, content) in enumerate(contents)
    ]
    at_least_one, once = draw.random() < 0.7, draw.random() < 0.5
    tree: dict[str, Any] = {"type": "triggered_tags", "triggers": [trigger], "tags": [tag for tag, _ in tags]}
    tree |= {"at_least_one": at_least_one, "stop_after_first": once}
    if bound := draw.random() < 0.5:
        tree = {"type": "or", "elements": [tag for tag, _ in tags]}

    def judge(answer: str) -> None:
        blocks = 0
        assert not bound or answer.startswith(trigger)
        while (found := answer.find(trigger)) >= 0:
            answer = answer[found:]
            tag, content = next(each for each in tags if answer.startswith(each[0]["begin"]))
            answer = answer[len(tag["begin"]) :]
            if isinstance(content, re.Pattern):
                match = content.match(answer)
                assert match
                end = match.end()
            else:
                _, end = json.JSONDecoder().raw_decode(answer)
                validate(content, answer[:end])
            assert answer[end:].startswith(tag["end"])
            answer = answer[end + len(tag["end"]) :]
            blocks += 1
            assert not answer or not (once or bound)
        assert blocks or not at_least_one

    opening = f"{trigger}{draw.randrange(len(tags))}>".encode()
    return Case(StructuralTag(json.dumps({"format": tree})), judge, (opening,))
