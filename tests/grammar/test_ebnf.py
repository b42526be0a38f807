"""Grammars of rules `name ::= ...`, compared with the lark package and with regular expressions."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import lark
import pytest

from infd.constraint import Ebnf
from infd.errors import GrammarFailed
from infd.grammar import ebnf
from infd.grammar.protocol import Limits
from tests.grammar import engines, vocabularies

# GBNF, and the same language for the lark package, whose complete dynamic lexer tries every way to cut the text.
if TYPE_CHECKING:
    from infd.grammar.protocol import Compiler

pytestmark = pytest.mark.usefixtures("engine")
RECURSIVE = {
    "parentheses": ('root ::= "" | "(" root ")" root', 'start: | "(" start ")" start'),
    "a short terminal before a longer one": (
        'root ::= ("a" | "ab") "b" rest\nrest ::= "" | "c" rest # recursive',
        'start: ("a" | "ab") "b" rest\nrest: | "c" rest',
    ),
    "letters before one of them": (
        'root ::= [a-c]* "c" more\nmore ::= "." | "(" more ")"',
        'start: /[a-c]/* "c" more\nmore: "." | "(" more ")"',
    ),
    "sums": (
        'root ::= root "+" term | term\n  term ::= num\n  | "(" root ")"\nnum ::= [0-9]{1,3}',
        'start: start "+" term | term\nterm: num | "(" start ")"\nnum: /[0-9]/~1..3',
    ),
    "quotes": (
        r'root ::= "\"" char* "\"" | "[" root "]"' + "\n" + r'char ::= [^"\\\n] | "\\" ["\\n]',
        r'start: "\"" char* "\"" | "[" start "]"' + "\n" + r'char: /[^"\\\n]/ | "\\" /["\\n]/',
    ),
}
REGULAR = {
    'root ::= greeting " " name "!"\ngreeting ::= "hi" | "hello"\nname ::= [A-Z] [a-z]*': r"(hi|hello) [A-Z][a-z]*!",
    'root ::= ("a" | "ab") "b"': r"(a|ab)b",
    'root ::= [a-z]* "a"': r"[a-z]*a",
    'root ::= x{2} y{1,} z{,2}\nx ::= "x"\ny ::= "\\x79" z ::= "\\u007A"': r"x{2}y{1,}z{0,2}",
    r'root ::= [\]\-^/a] [^\x00-\x60] . "\U0001F600"': r"[\]\-\^/a][^\x00-\x60](?s:.)😀",
    'root ::= a-b ( # comment )"\n | "/" )\na-b ::= ("-")?': r"-?/?",
}
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@engines.each
def compiler() -> Compiler:
    return engines.compiler(vocabularies.byte_level(7))


def answers(grammar: str, number: int, seed: int = 1) -> list[str]:
    """Return finished answers of random walks."""
    draw, compiled = random.Random(seed), compiler().compile(Ebnf(grammar), Limits())
    walks = [vocabularies.walk(compiler(), compiled.matcher(), draw, 40) for _ in range(number)]
    return [found for each in walks if (found := vocabularies.text(compiler().vocabulary, each)) is not None]


def accepted(grammar: str, text: str) -> bool:
    matcher = compiler().compile(Ebnf(grammar), Limits()).matcher()
    tokens = vocabularies.split(compiler().vocabulary, text.encode(), random.Random(3))
    if matcher.validate(tokens) < len(tokens):
        return False
    matcher.advance(tokens)
    return matcher.accepting


def parsed(parser: lark.Lark, text: str) -> bool:
    try:
        parser.parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


@pytest.mark.parametrize(("grammar", "same"), RECURSIVE.values(), ids=RECURSIVE)
def test_a_recursive_grammar_accepts_the_texts_that_lark_accepts(grammar: str, same: str):
    parser = lark.Lark(same, parser="earley", lexer="dynamic_complete")
    found = answers(grammar, 40)
    assert len(found) > 5
    assert all(parsed(parser, each) for each in found)

    draw = random.Random(2)
    for text in {each for one in found for each in variants(one[:12], draw)}:
        assert accepted(grammar, text) == parsed(parser, text), text


def variants(text: str, draw: random.Random) -> list[str]:
    """Return a text, its beginnings, and texts with characters swapped, dropped and doubled."""
    changed = [text, text[: len(text) // 2], text + text]
    for _ in range(4):
        letters = list(text) or ["a"]
        at = draw.randrange(len(letters))
        letters[at] = draw.choice([*letters, "a", "b", "c", ")", ""]) * draw.randint(1, 2)
        changed.append("".join(letters))
    return changed


@pytest.mark.parametrize(("grammar", "pattern"), REGULAR.items(), ids=REGULAR)
def test_a_grammar_without_recursion_accepts_the_texts_of_its_regular_expression(grammar: str, pattern: str):
    found = answers(grammar, 30)
    assert found
    assert all(re.fullmatch(pattern, each) for each in found)
    draw = random.Random(2)
    for text in {each for one in found for each in variants(one[:12], draw)}:
        assert accepted(grammar, text) == (re.fullmatch(pattern, text) is not None), text


def test_a_json_grammar_gives_json():
    found = answers(JSON, 40)
    assert len(found) > 5
    for each in found:
        assert isinstance(json.loads(each), dict)
    assert accepted(JSON, '{"a": [1, -2.5e3, {"b": null}], "c\\n": ""}')
    assert not accepted(JSON, '{"a": 01}')


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start ::= "a"', "no rule is named root"),
        ("root ::= other", "no rule is named other"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule root is defined twice"),
        ('root ::= ("a"', "a \\) is missing"),
        ('root ::= "a', "is not expected"),
        ("root ::= [z-a]", "is empty"),
        ("root ::= []", "without characters"),
        ("root ::= *", "repeats nothing"),
        ('root ::= "a"{3,2}', "is empty"),
        (r'root ::= "\ud800"', "is no character"),
        (r'root ::= "\x4"', "without its digits"),
        ('"a"', "is expected"),
        ("root ::= (?=a)", "repeats nothing"),
    ],
)
def test_a_malformed_grammar_is_refused_with_its_line(grammar: str, message: str):
    with pytest.raises(GrammarFailed, match=message) as failed:
        ebnf.to_lark(grammar, Limits())
    assert failed.value.code == "invalid_grammar"


def test_nesting_and_alternatives_are_bounded():
    for grammar in ("root ::= " + "(" * 70 + ")" * 70, "root ::= " + "|" * 20_000):
        with pytest.raises(GrammarFailed) as failed:
            ebnf.to_lark(grammar, Limits())
        assert failed.value.code == "grammar_too_large"
