"""Terminals of a grammar of characters are as large as may be, and the lexer reads with them what the rules derive."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infd.constraint import Ebnf
from infd.grammar import ebnf, lark, lexing
from infd.grammar.llguidance import LlguidanceCompiler
from infd.grammar.protocol import Limits
from infd.grammar.rules import trimmed
from tests.grammar import vocabularies
from tests.grammar.ambiguous_grammars import ALIKE, CLASSES, draw_grammar
from tests.grammar.recogniser import Recogniser
from tests.grammar.shortest import ShortestEnd
from tests.thorough import among

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from infd.grammar.protocol import Grammar

GRAMMARS = sorted((Path(__file__).parent / "gbnf").glob("*.gbnf"))
LETTERS = 'abcé€()+"\\ \n<>=-/*`#{}[]:,0123479.'


@cache
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(vocabularies.byte_level(7))


def accepts(grammar: Grammar, text: str, draw: random.Random) -> bool:
    tokens = vocabularies.split(compiler().vocabulary, text.encode(), draw)
    matcher = grammar.matcher()
    if matcher.validate(tokens) < len(tokens):
        return False
    matcher.advance(tokens)
    return matcher.accepting


def compare(grammar: str, texts: Iterable[str], derives: Callable[[str], bool], draw: random.Random) -> tuple[int, int]:
    """Compare the terminals with the rules; return the numbers of texts that the rules derive and do not derive."""
    compiled, derived, others = compiler().compile(Ebnf(grammar), Limits()), 0, 0
    for text in texts:
        expected = derives(text)
        assert accepts(compiled, text, draw) == expected, (grammar, text)
        derived, others = derived + expected, others + (not expected)
    return derived, others


def changed(text: str, draw: random.Random) -> str:
    """Return a text with one character replaced, dropped, doubled or moved."""
    letters = list(text) or ["a"]
    at, to = draw.randrange(len(letters)), draw.randrange(len(letters))
    letters[at] = draw.choice([draw.choice(LETTERS), "", letters[at] * 2, letters[to]])
    return "".join(letters)


def random_grammars(numbers: Iterable[int]) -> tuple[int, int]:
    derived, others = 0, 0
    for number in numbers:
        draw = random.Random(number)
        grammar = draw_grammar(draw, CLASSES + ALIKE)
        sentences = [grammar.sentence(draw)[:14] for _ in range(8)]
        texts = {
            each for one in sentences for each in (one, changed(one, draw), changed(one, draw), one[: len(one) // 2])
        }
        found = compare(grammar.in_gbnf(), sorted(texts), grammar.derives, draw)
        derived, others = derived + found[0], others + found[1]
    return derived, others


def test_the_lexer_reads_what_random_ambiguous_grammars_derive():
    derived, others = random_grammars(range(8))
    assert derived > 20
    assert others > 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(4))
def test_the_lexer_reads_what_many_random_ambiguous_grammars_derive(part: int):
    number = among(80, 80, 250)
    derived, others = random_grammars(range(100 + 250 * part, 100 + 250 * part + number))
    assert derived > 6 * number
    assert others > 6 * number


def written(path: Path, number: int, most: int) -> tuple[int, int]:
    """Compare texts of a grammar's random answers, cut and finished along a shortest path, and changes of them."""
    grammar, draw = path.read_text(), random.Random(path.name)
    rules = ebnf.parse(grammar, Limits())
    compiled, trim = compiler().compile(Ebnf(grammar), Limits()), trimmed(rules)
    assert trim is not None
    search, texts = ShortestEnd(trim), set()
    for _ in range(number):
        walked = vocabularies.walk(compiler(), compiled.matcher(), draw, 12, ends=0.1)
        cut = b"".join(
            compiler().vocabulary.tokens[each] for each in walked if each not in compiler().vocabulary.end_ids
        )
        cut = cut[: draw.randrange(most)]
        end = search.of(cut)
        assert end is not None
        text = (cut + end).decode()
        texts |= {text, changed(text, draw), changed(text, draw), changed(changed(text, draw), draw)}
    return compare(grammar, sorted(texts), lambda text: Recogniser(rules, text).derives(), draw)


@pytest.mark.parametrize("path", GRAMMARS, ids=lambda path: path.stem)
def test_the_lexer_reads_what_grammars_as_people_write_them_derive(path: Path):
    derived, others = written(path, 4, 16)
    assert derived > 3
    assert others


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", GRAMMARS, ids=lambda path: path.stem)
def test_the_lexer_reads_many_texts_of_grammars_as_people_write_them(path: Path):
    derived, others = written(path, 60, 40)
    assert derived > 60
    assert others > 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", GRAMMARS, ids=lambda path: path.stem)
def test_masks_of_150_000_tokens_are_within_the_limit_of_items(path: Path):
    draw, compiled = random.Random(path.name), large().compile(Ebnf(path.read_text()), Limits())
    for _ in range(among(3, 3, 6)):
        assert vocabularies.walk(large(), compiled.matcher(), draw, 60)


@cache
def large() -> LlguidanceCompiler:
    return LlguidanceCompiler(vocabularies.large())


def terminals(grammar: str) -> list[str]:
    """Return the terminals of a grammar, written as Lark."""
    lines = lark.write(lexing.divided(ebnf.parse(grammar, Limits()))).splitlines()
    return [line.partition(": ")[2] for line in lines if line.startswith("T")]


@pytest.mark.parametrize(
    ("grammar", "written"),
    [
        ('root ::= "d" root "e" | word\nword ::= [ab] word | "c"', ["/d/", "/e/", "R1"]),  # recursion at one end
        ('root ::= "d" root "e" | sum\nsum ::= sum [+] [a-z] | "a"', ["/d/", "/e/", "R1"]),
        ('root ::= "b" root "c" | "ab" "a"', ["/b/", "/c/", "((/a/ /b/) /a/)"]),
        ('root ::= "b" root "c" | "ab" "c"?', ["/b/", "/c/", "(/a/ /b/)", "/c/"]),  # c may end a terminal or follow it
        ('root ::= "b" root "c" | [ab]+ "a"', ["/b/", "/c/", "/[a-b]/", "/a/"]),  # b may begin it or come alone
        ('root ::= "b" root "é" | [acè]+', ["/b/", "/\\x{e9}/", "/[ac\\x{e8}]/"]),  # è and é have the same first byte
        ('root ::= "b" root "é" | [ac€]+', ["/b/", "/\\x{e9}/", "(/[ac\\x{20ac}]/)+"]),
        ('root ::= "b" ([ac] | root)* "d"', ["/b/", "/d/", "(/[ac]/)+"]),  # runs between recursive items
    ],
)
def test_terminals_are_divided_only_where_one_can_continue(grammar: str, written: list[str]):
    assert terminals(grammar) == written


def test_a_string_of_json_is_part_of_one_terminal():
    grammar = (Path(__file__).parent / "gbnf" / "json.gbnf").read_text()
    assert len(terminals(grammar)) < 9


def test_terminals_that_are_too_large_to_compare_are_characters():
    grammar = 'root ::= "(" root ")" | ([ab]* "a" [ab]{14} | "c" "d")'
    assert not terminals(grammar)
    draw = random.Random(1)
    rules = ebnf.parse(grammar, Limits())
    texts = ["(cd)", "((a" + "b" * 14 + "))", "(ab)", "cd", "c", "(a" + "b" * 15 + ")"]
    assert compare(grammar, texts, lambda text: Recogniser(rules, text).derives(), draw) == (3, 3)
