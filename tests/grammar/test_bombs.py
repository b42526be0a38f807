"""Constraints made to exhaust time or memory end within their limits, with a named error or with an answer.

The bounds are processor time of the thread that compiles or fills a mask, on which the machine's load has no effect but
that of shared caches and cores. A worker's time is bounded by the kernel, in the same unit: see test_trial.
"""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from infd.constraint import Calls, Choice, Constraint, Ebnf, JsonSchema, Lark, Regex, ToolSchema
from infd.errors import GrammarFailed
from infd.grammar.protocol import Limits
from infd.grammar.xgrammar_trial import SLOWNESS
from infd.text.tools.families_json import HERMES
from tests.grammar import engines, vocabularies

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.grammar.protocol import Compiler

pytestmark = pytest.mark.usefixtures("engine")

# Processor time of this process; without limits some of these take minutes, or never end. xgrammar compiles slower, and
# what its trial compiles within its limit, this process compiles again.
SECONDS = {"llguidance": 1.0, "xgrammar": SLOWNESS * Limits().seconds}
MASK_S = 0.25


def schema(**keywords: Any) -> JsonSchema:
    return JsonSchema(json.dumps(keywords))


GRAMMAR = HERMES.grammar
assert GRAMMAR is not None


def properties(number: int, *, required: bool = False) -> dict[str, Any]:
    named = {f"p{index}": {"type": "string"} for index in range(number)}
    return {"type": "object", "properties": named, "required": list(named) if required else []}


def doubling(levels: int, rule: str) -> str:
    rules = [f"{rule}{level}: {rule}{level + 1} {rule}{level + 1}" for level in range(levels)]
    return "\n".join([f"start: {rule}0", *rules, f'{rule}{levels}: "a"'])


def chained(levels: int, keyword: str) -> JsonSchema:
    links = {f"d{level}": {keyword: [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(levels)}
    return schema(**{"$defs": {**links, f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def referring(definitions: int, levels: int) -> JsonSchema:
    """A schema of definitions, each of which has levels of arrays around a reference to the next definition."""
    links = {}
    for number in range(definitions):
        links[f"d{number}"] = schema_of = {"items": {"$ref": f"#/$defs/d{number + 1}"}}
        for _ in range(levels - 1):
            links[f"d{number}"] = schema_of = {"items": schema_of}
    return schema(**{"$defs": {**links, f"d{definitions}": {"type": "integer"}}, "$ref": "#/$defs/d0"})


def nesting(rules: int) -> Ebnf:
    nested = [f'r{number} ::= "({number}" r{number + 1}? ")"' for number in range(rules)]
    return Ebnf("\n".join(["root ::= r0", *nested, f'r{rules} ::= "x"']))


PATTERNS = {"allOf": [{"pattern": f".*{a}.*{b}"} for a in "abcdef" for b in "uvwxyz"]}
TOOL = ToolSchema("f", json.dumps({"properties": {"a": PATTERNS}, "required": ["a"]}), "tools[0]")
NO_ARGUMENTS = ToolSchema("f", '{"type": "object"}', "tools[0]")
CRASHES_ELSEWHERE: dict[str, Constraint] = {  # CVE-2025-48942, -48943, -48944 of vLLM
    "a type that is none": schema(type="something", properties={"a": {"type": "strin"}}),
    "a pattern of a lone quantifier": schema(type="string", pattern="*"),
    "a pattern of an open class": schema(type="string", pattern="[a-z"),
    "an open class": Regex("[a-z"),
    "a lone backslash": Regex("\\"),
    "properties that are a string": schema(properties="stone"),
    "a schema that is a string": JsonSchema('"stone"'),
    "a schema that is no JSON": JsonSchema("{"),
    "arguments of no type": Calls(GRAMMAR, (ToolSchema("f", '{"type": "something"}', "tools[0]"),), required=True),
    "a recursive Lark rule without end": Lark("start: a\na: b\nb: a"),
}
REFUSED: dict[str, Constraint] = {
    **CRASHES_ELSEWHERE,
    "500 optional properties": schema(**properties(500)),
    "1,000 optional properties": schema(**properties(1000)),
    "2,000 optional properties": schema(**properties(2000)),
    "5,000 optional properties": schema(**properties(5000)),
    "25,000 required names": schema(type="object", required=[f"p{each}" for each in range(25_000)]),
    "an enum of 50,000": schema(enum=[f"value {each}" for each in range(50_000)]),
    "2,000 properties": schema(**properties(2000, required=True)),
    "an enum of 200,000": schema(enum=[str(each) for each in range(200_000)]),
    "an enum of 20,000": schema(enum=list(range(20_000))),
    "400 levels": schema(**json.loads('{"items":' * 400 + "{}" + "}" * 400)),
    "20,000 brackets": JsonSchema("[" * 20_000),
    "36 patterns at once": schema(**PATTERNS),
    "3^12 alternatives": schema(
        allOf=[{"anyOf": [{"properties": {f"a{i}{j}": {"type": "null"}}} for j in range(3)]} for i in range(12)]
    ),
    "integers beyond 64 bits": schema(type="integer", minimum=-(10**30), maximum=10**30),
    "an integer of 9,000 digits": JsonSchema('{"minimum": ' + "1" * 9000 + "}"),
    "1,200 references in a row": referring(1200, 1),
    "20,000 levels behind references": referring(400, 50),
    "1,500 rules one in another": nesting(1500),
    "a schema of itself": JsonSchema('{"$ref": "#"}'),
    "multipleOf 1e-300": JsonSchema('{"type": "number", "multipleOf": 1e-300}'),
    "20,000 alternatives": Lark("start: " + " | ".join(f'"w{each}"' for each in range(20_000))),
    "a terminal doubled 30 times": Lark(doubling(30, "R")),
    "26 intersections": Lark("start: A\nA: " + " & ".join(f"/.*{each}.*/" for each in "abcdefghijklmnopqrstuvwxyz")),
    "36 patterns behind a token by number": Lark(f"start: <[3000]> %json {json.dumps(PATTERNS)}"),
    "36 patterns behind a token by name": Lark(f"start: <think> %json {json.dumps(PATTERNS)}"),
    "36 patterns beside a call": Calls(GRAMMAR, (NO_ARGUMENTS,), required=False, otherwise=schema(**PATTERNS)),
    "arguments of 36 patterns at once": Calls(GRAMMAR, (TOOL,), required=True),
    "5,000 parentheses": Lark("start: " + "(" * 5000 + '"a"' + ")" * 5000),
    "a terminal of itself": Lark("start: A\nA: A"),
    "a rule of itself": Lark("start: start"),
    "spaces in an open brace": Ebnf('root ::= "a"{' + " " * 600),
    "digits in an open brace": Ebnf('root ::= "a"{' + "1" * 20_000),
    "20,000 repetitions in digits": Ebnf('root ::= "a"{' + "1" * 20_000 + "}"),
    "quotes in an open string": Lark('start: "' + '\\"' * 20_000),
    "slashes in an open expression": Lark("start: /" + "\\/" * 20_000),
    "open brackets": Lark("start: " + "a[" * 20_000),
    "a boundary behind digits": schema(pattern="[a]{" + "1" * 20_000 + r"}\b[b]*$"),
    "an error behind 100,000 characters": Regex("a" * 100_000 + "("),
    "nested groups": Regex("(" * 5000 + "a" + ")" * 5000),
    "a?^n a^n": Regex("a?" * 2000 + "a" * 2000),
    "520 optional groups": Regex("".join(f"(.*{each})?" for each in "abcdefghijklmnopqrstuvwxyz") * 20),
    "20,000 options": Choice(tuple(str(each) for each in range(20_000))),
    "a megabyte": Choice(("a" * 2**20,)),
}
SERVED: dict[str, Constraint] = {
    "200 optional properties": schema(**properties(200)),
    "1,000 required properties": schema(**properties(1000, required=True)),
    "an enum of 10,000": schema(enum=[f"value {each}" for each in range(10_000)]),
    "a million items": schema(type="array", minItems=10**6),
    "a million characters": schema(type="string", minLength=10**6),
    "60 doublings of anyOf": chained(60, "anyOf"),
    "25 doublings of allOf": chained(25, "allOf"),
    "5,000 prefixItems": schema(prefixItems=[{"type": "integer"}] * 5000),
    "a rule doubled 30 times": Lark(doubling(30, "r")),
    "an ambiguous rule": Lark('start: start start | "a" | ""'),
    "empty repetitions": Lark('start: a*\na: b*\nb: "x"?'),
    "10^9 repetitions": Lark('start: x{1000}\nx: y{1000}\ny: "a"{1000}'),
    "(a|aa){1,500}{1,500}": Regex("(?:(a|aa){1,500}){1,500}"),
    "(x+x+)+y": Regex("(x+x+)+y"),
    ".*a.{200}": Regex(".*a.{200}"),
    "a^(10^9)": Regex("(?:(?:a{1000}){1000}){1000}"),
    "(.{0,1000}){0,1000}": Regex("(.{0,1000}){0,1000}"),
    "10^8 repetitions of nothing": Regex("(?:(?:){10000}){10000}"),
    "3,000 lengths": Regex("|".join(f"a{{{each}}}b" for each in range(3000))),
    "20,000 digits behind an open brace": schema(pattern="[a]{" + "1" * 20_000),
    "10,000 options": Choice(tuple(f"option {each}" for each in range(10_000))),
}


@pytest.fixture(scope="module")
def compiler(engine: str) -> Iterator[Compiler]:
    trial = engines.trial()
    yield engines.compiler(vocabularies.large(), trial)
    trial.close()


# Names of constraints that take more than a second with an engine.
SLOW = {
    "3^12 alternatives": "xgrammar",
    "25,000 required names": "xgrammar",
    "200 optional properties": "xgrammar",
    "1,000 required properties": "xgrammar",
    "a million items": "xgrammar",
    "a million characters": "xgrammar",
    "5,000 prefixItems": "xgrammar",
    "1,200 references in a row": "xgrammar",
    "20,000 levels behind references": "xgrammar",
    "1,500 rules one in another": "xgrammar",
    "36 patterns beside a call": "xgrammar",
    "arguments of 36 patterns at once": "xgrammar",
    "36 patterns behind a token by number": "llguidance",
    "36 patterns behind a token by name": "llguidance",
}
# xgrammar refuses these, because their automata are too large.
LARGE_AUTOMATA = {
    "(a|aa){1,500}{1,500}",
    ".*a.{200}",
    "a^(10^9)",
    "(.{0,1000}){0,1000}",
    "10^8 repetitions of nothing",
    "3,000 lengths",
    "20,000 digits behind an open brace",
}


def params(constraints: dict[str, Constraint]) -> list[Any]:
    return [
        pytest.param(name, each, id=name, marks=[pytest.mark.exhaustive_with(SLOW[name])] if name in SLOW else [])
        for name, each in constraints.items()
    ]


@pytest.mark.parametrize(("name", "constraint"), params(REFUSED))
def test_a_bomb_is_refused_by_name(engine: str, compiler: Compiler, name: str, constraint: Constraint):
    began = time.thread_time()
    with pytest.raises(GrammarFailed) as failed:
        compiler.compile(constraint, Limits())
    assert time.thread_time() - began < SECONDS[engine]
    assert failed.value.code in ("grammar_too_large", "invalid_grammar", "unsupported_grammar")


@pytest.mark.parametrize(("name", "constraint"), params(SERVED))
def test_a_large_constraint_is_compiled_and_followed_within_its_limits(
    engine: str, compiler: Compiler, name: str, constraint: Constraint
):
    began = time.thread_time()
    if engine == "xgrammar" and name in LARGE_AUTOMATA:
        with pytest.raises(GrammarFailed, match="too large for one automaton"):
            compiler.compile(constraint, Limits())
        assert time.thread_time() - began < SECONDS[engine]
        return
    matcher = compiler.compile(constraint, Limits()).matcher()
    assert time.thread_time() - began < SECONDS[engine]

    draw, rows = random.Random(1), np.empty((1, compiler.vocabulary.words), dtype=np.int32)
    with suppress(GrammarFailed):
        for _ in range(60):
            began = time.thread_time()
            (failure,) = compiler.fill([matcher], rows)
            assert time.thread_time() - began < MASK_S
            if failure is not None:
                break
            allowed = np.flatnonzero(np.unpackbits(rows[0].view(np.uint8), bitorder="little")).tolist()
            assert allowed
            matcher.advance([draw.choice(allowed)])
            if matcher.stopped:
                break


def test_after_a_bomb_the_next_constraint_is_compiled(compiler: Compiler):
    with pytest.raises(GrammarFailed) as failed:
        compiler.compile(REFUSED["36 patterns at once"], Limits())
    assert failed.value.code == "grammar_too_large"
    assert compiler.compile(Regex("a+"), Limits()).matcher()


def test_arrangements_are_counted_before_they_are_listed(compiler: Compiler):
    forty_thousand = schema(type="array", items={"enum": list(range(8))}, uniqueItems=True, minItems=8)
    with pytest.raises(GrammarFailed, match="too many arrangements"):
        compiler.compile(forty_thousand, Limits())


MARKDOWN = r"""root ::= block+
block ::= heading | list | quote | paragraph
heading ::= "#"+ " " inline "\n"
list ::= ("- " inline "\n" ("  " block)*)+
quote ::= "> " block
paragraph ::= inline "\n"
inline ::= (text | bold | italic)+
text ::= [^\n]+
bold ::= "**" inline "**"
italic ::= "*" inline "*"
"""
# In which each text has one reading: as the error advises.
UNAMBIGUOUS = r"""root ::= block+
block ::= heading | list | quote | paragraph
heading ::= "#"+ " " inline "\n"
list ::= "- " inline "\n" ("  " (list | paragraph))*
quote ::= "> " paragraph
paragraph ::= [^\n*_#> -] inline? "\n"
inline ::= (text | bold | italic)+
text ::= [^\n*_]
bold ::= "**" text+ "**"
italic ::= "_" text+ "_"
"""


@pytest.mark.exhaustive
def test_the_error_of_an_ambiguous_grammar_names_the_remedy(engine: str, compiler: Compiler):
    if engine != "llguidance":
        pytest.skip("xgrammar has no limit of readings")
    draw, advice = random.Random(1), "derive each text in one way only"
    with pytest.raises(GrammarFailed, match=advice) as refused:
        compiler.compile(Ebnf(MARKDOWN), Limits())
    assert refused.value.code == "grammar_too_large"
    failing = compiler.compile(Lark('start: x\nx: x x | "a" | /[a-z ]/ | "(" x ")"'), Limits()).matcher()
    with pytest.raises(GrammarFailed, match=advice) as failed:
        vocabularies.walk(compiler, failing, draw, 60, ends=0)
    assert failed.value.code == "grammar_failed"

    assert len(vocabularies.walk(compiler, compiler.compile(Ebnf(UNAMBIGUOUS), Limits()).matcher(), draw, 60)) == 60
