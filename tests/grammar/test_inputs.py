"""The input of a custom tool is what a client's Lark grammar derives, in every syntax of calls.

The judge is the lark package, with its own parser and lexer.
"""

from __future__ import annotations

import json
import random
from functools import cache

import lark
import pytest

from infd.constraint import Calls, CallSyntax, ToolSchema
from infd.errors import GrammarFailed
from infd.grammar import constraint_rules
from infd.grammar.llguidance import LlguidanceCompiler
from infd.grammar.protocol import Limits, Vocabulary
from infd.text import tools
from infd.text.markup import Reading
from infd.text.tools.offered import Offered
from tests.grammar.vocabularies import walk

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
)
QUERIES = r"""
// a little of SQL, with all that JSON escapes
?start: select ";"?
select: "SELECT"i columns _FROM NAME [where]
columns: "*" | NAME ("," NAME)~0..2 -> some
where: "WHERE" condition
condition: NAME OPERATOR (NUMBER | TEXT) | "(" condition ")"
_FROM: "from"i
OPERATOR: "=" | "<" ">"? | ">" "="?
TEXT: "\"" (/[^"\\\n]/ | "\\" ("n" | "t" | "\""))~0..12 "\""
NAME: /[a-cé]{1,3}/
%import common.INT -> NUMBER
%import common (WS, SQL_COMMENT)
%ignore /[ \t]{1,2}\n?/
"""
LINES = 'start: line+\nline: WORD (" " WORD)? "\\n"\nWORD: /[a-c<>\\/]+/'
XML = 'start: "<" NAME ">" "</" NAME ">"\nNAME: /[a-z]+/'


@cache
def compiler(marks: tuple[str, ...]) -> LlguidanceCompiler:
    pieces = [*(bytes([byte]) for byte in range(256)), *map(str.encode, marks), b"<end>"]
    special = frozenset(range(256, len(pieces)))
    return LlguidanceCompiler(Vocabulary(pieces, special, frozenset({len(pieces) - 1}), len(pieces), lambda text: []))


def calls(grammar: str, syntax: CallSyntax) -> Calls:
    return Calls(syntax, (ToolSchema("query", SCHEMA, "tools[0]", grammar),), required=True, parallel=False)


def syntax_of(name: str) -> CallSyntax:
    found = tools.SYNTAXES[name].grammar
    assert found is not None
    return found


def inputs(name: str, grammar: str, marks: tuple[str, ...], draw: random.Random) -> str | None:
    """Return the input of a random forced call, as the syntax's parser reads it; None if the call does not end."""
    compiled = compiler(marks)
    matcher = compiled.compile(calls(grammar, syntax_of(name)), Limits()).matcher()
    tokens = walk(compiled, matcher, draw, 700, ends=0.5)
    if tokens[-1] not in compiled.vocabulary.end_ids:
        return None
    text = b"".join(compiled.vocabulary.tokens[token] for token in tokens[:-1]).decode()
    reading = Reading(calls=tools.SYNTAXES[name].start(Offered({"query": SCHEMA.encode()})))
    reading.feed(text)
    reading.finish()
    aside = reading.take()
    assert aside is not None, text
    (call,) = aside.calls
    assert call.name == "query"
    found = json.loads(call.arguments)
    assert list(found) == ["input"], text
    assert isinstance(found["input"], str)
    return found["input"]


def read_by_lark(name: str, spelled: bool, times: int) -> int:
    """Draw inputs of two grammars; return the number that ended. Each must be a text of its grammar."""
    draw, ended = random.Random(f"{name} {spelled}"), 0
    for grammar in (QUERIES, LINES):
        judge = lark.Lark(grammar, parser="earley")
        for _ in range(times):
            if (found := inputs(name, grammar, () if spelled else syntax_of(name).marks, draw)) is not None:
                ended += 1
                judge.parse(found)
    return ended


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "glm47", "pythonic"])
def test_a_forced_input_is_read_as_a_text_of_the_grammar(name: str):
    assert read_by_lark(name, spelled=True, times=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("name", tools.SYNTAXES)
def test_a_forced_input_of_each_syntax_is_read_as_a_text_of_the_grammar(name: str, spelled: bool):
    assert read_by_lark(name, spelled, times=4) >= 4


JSON = CallSyntax(call='{"name": "$name", "arguments": $arguments}', trigger="{", marks=())
VALUES = CallSyntax(
    call="<call>$name\n$arguments</call>",
    trigger="<call>",
    marks=(),
    parameter="<parameter=$key>\n$value\n</parameter>\n",
)


def allows(grammar: str, text: str, syntax: CallSyntax = JSON) -> bool:
    """Return whether a call with this input, written as it is in the call, is allowed."""
    written = {
        JSON: '{"name": "query", "arguments": {"input": "' + text + '"}}',
        VALUES: f"<call>query\n<parameter=input>\n{text}\n</parameter>\n</call>",
    }
    tokens = list(written[syntax].encode())
    matcher = compiler(()).compile(calls(grammar, syntax), Limits()).matcher()
    return matcher.validate(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("grammar", "allowed", "refused"),
    [
        ('start: "a\\"\\n\\x07"', ['a\\"\\n\\u0007'], ["a"]),
        ('start: "ab"i', ["ab", "aB", "AB"], ["b"]),
        ('start: "a".."c"~2', ["ab", "cc"], ["a", "ad"]),
        ('start: "a"~1..2 ["b"]', ["a", "aab"], ["b", "aaa"]),
        ('start: "a"{2,}', ["aa", "aaaa"], ["a"]),
        ("start: /a.b/s", ["a\\nb", "axb"], ["ab"]),
        ("start: /a.b/", ["axb", "a\\\\b"], ["a\\nb"]),
        ("start: /é+/i", ["éÉ"], ["e"]),
        ("start: /a  b # c/x", ["ab"], ["a  b"]),
        ('start: x\n!x: "(" x? ")" -> inner', ["(())"], ["(()"]),
        ('start: A+\nA: "a" | B\nB: "b"', ["abba"], ["c"]),
        ('start: "a" "b"\n%ignore " "', ["ab", "a  b", " ab"], ["ab "]),
        (
            '%import common.WS\n%ignore WS\nstart: TEXT+\nTEXT: "\\"" /[^"]/+ "\\""',
            ['\\"a\\" \\"b\\"', '\\"a\\"\\n\\t \\"\\n\\"'],
            ['\\"a\\" ', '\\"a\\"b'],
        ),
        ('start: /[^"]+/ "\\"" /\\d?/', ['ab\\n\\\\\\"', '\\\\\\"7'], ["a", '\\"']),
        ("%import common.SIGNED_NUMBER -> N\nstart: N", ["-1.5e3", "7"], ["e"]),
        ("%import common.ESCAPED_STRING\nstart: ESCAPED_STRING", ['\\"a\\\\\\"b\\"'], ['"']),
    ],
)
def test_the_kept_parts_of_lark(grammar: str, allowed: list[str], refused: list[str]):
    for text in allowed:
        assert allows(grammar, text), text
        json.loads(f'"{text}"')
    for text in refused:
        assert not allows(grammar, text), text


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: A\nA.2: /a/", "line 2: priorities of terminals and rules: not supported"),
        ("start: x{A}\nx{y}: y", "line 1: templates: not supported"),
        ("%declare A\nstart: A", "line 1: %declare: not supported"),
        ("%import python.NAME\nstart: NAME", "line 1: %import of other terminals than those of common"),
        ("%import common.NOTHING\nstart: NOTHING", "common has no terminal NOTHING"),
        ("start: /a(?=b)/", "look-around is not kept"),
        ("start: /^a/", "anchors in a regular expression: not supported"),
        ("start: /a/m", "the flag m of a regular expression"),
        ("start: a", "no rule is named a"),
        ("begin: /a/", "no rule is named start"),
        ("start: A\nA: start", "a terminal refers to a rule"),
        ('start: A\nA: "a" B\nB: A?', "a terminal refers to itself"),
        ('start: "a" |\nstart: "b"', "the rule start is defined twice"),
        ('start: "\\d"', "a string with the escape \\d"),
        ('start: ("a"', "line 1: a ) is missing"),
        ('start: %json {"type": "object"}', "line 1: %json: not supported"),
        ("start: <a>", "'<' is not expected"),
        ('start: "a"~3..2', "is empty"),
        ("start: " + "\\w" * 1, "is not expected"),
        ("start: /" + r"\w" * 40 + "/", "too large classes of characters"),
    ],
)
def test_what_lark_has_beyond_that_is_refused_by_name(grammar: str, message: str):
    with pytest.raises(GrammarFailed) as refusal:
        compiler(()).compile(calls(grammar, JSON), Limits())
    assert message in str(refusal.value)
    assert refusal.value.param in ("tools[0]", None)


def test_an_input_without_quotes_contains_no_mark():
    assert allows(QUERIES, 'select a from b WHERE a = "</param>"', VALUES)
    assert not allows(QUERIES, 'select a from b WHERE a = "</parameter>"', VALUES)
    assert allows(QUERIES, 'select a from b WHERE a = "</parameter>"'.replace('"', '\\"'))
    assert allows(LINES, "<a\n", VALUES)
    assert not allows(LINES, "<a", VALUES)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (XML, "texts that contain '</parameter>'"),
        ('start: "<" x\nx: "/" "para" "meter>"', "texts that contain '</parameter>'"),
        ('start: "</para" /x?/ "meter>"', "texts that contain '</parameter>'"),
        ("start: /(?s:.)+/", "a text whose last terminal can go on with '\\n'"),
    ],
)
def test_a_grammar_that_could_write_the_closing_mark_is_refused_where_arguments_have_no_quotes(
    grammar: str, message: str
):
    with pytest.raises(GrammarFailed) as refusal:
        compiler(()).compile(calls(grammar, VALUES), Limits())
    assert message in str(refusal.value)
    assert refusal.value.param == "tools[0]"
    compiler(()).compile(calls(grammar, JSON), Limits())


def test_the_engine_that_keeps_no_lark_refuses_the_tool_by_name():
    with pytest.raises(GrammarFailed) as refusal:
        constraint_rules.write(calls(LINES, JSON), Limits(), lambda mark: None)
    assert refusal.value.param == "tools[0]"
    assert "kept by llguidance only" in str(refusal.value)
