"""Ends of cut texts where the lexer takes the longest terminal: compared with llguidance's matchers and the rules."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from infd.constraint import Ebnf, Lark
from infd.grammar import lark_syntax
from infd.grammar.llguidance import LlguidanceCompiler
from infd.grammar.protocol import Limits, Vocabulary
from tests.grammar import vocabularies
from tests.grammar.ambiguous_grammars import draw_grammar
from tests.grammar.finishing import Finisher
from tests.grammar.longest_match import LongestMatch
from tests.grammar.test_shortest import ends
from tests.thorough import among

# After it, the lexer reads the shortest end of the rules otherwise, and so most ends that are longer.
AMBIGUOUS = """\
start: (("ba")+ | (/[ab]/)? (one | "aba" | "+") ("ab" | two) start | (/[bcé]/)* | ((")"){1,3})? start "aba" two)
one: ("b" | ("c")+ one)
two: (("abc")+ | (("b"){1,3} | ("c" | /[ab]/ | start) | "(" "(") two | "c" (")" | one) (one | ")" | two))"""


@cache
def compiler() -> LlguidanceCompiler:
    tokens = [*(bytes([byte]) for byte in range(256)), b""]
    return LlguidanceCompiler(Vocabulary(tokens, frozenset(), frozenset({256}), 257, lambda text: []))


def model(grammar: str) -> LongestMatch:
    return LongestMatch(lark_syntax.parse(grammar, Limits()))


def accepts(grammar: str, text: bytes) -> bool:
    matcher = compiler().compile(Lark(grammar), Limits()).matcher()
    if matcher.validate(list(text)) < len(text):
        return False
    matcher.advance(list(text))
    return matcher.accepting


def test_the_model_reads_what_llguidance_reads():
    draw, read, others, number = random.Random(4), 0, 0, among(2, 30, 400)
    for _ in range(number):
        grammar = draw_grammar(draw)
        modelled, lark = model(grammar.in_lark()), grammar.in_lark()
        sentences = [grammar.sentence(draw, 4)[:20] for _ in range(6)]
        for text in sentences + ["".join(draw.sample(each, len(each))) for each in sentences]:
            expected = accepts(lark, text.encode())
            assert modelled.reads(text) == expected, (lark, text)
            read, others = read + expected, others + (not expected)
    assert read > number
    assert others > number


def test_llguidance_reads_the_ends_of_random_grammars_and_none_that_is_shorter():
    draw, proven, longer, number = random.Random(26), 0, 0, among(6, 60, 600)
    for _ in range(number):
        grammar = draw_grammar(draw)
        lark, matcher = grammar.in_lark(), compiler().compile(Lark(grammar.in_lark()), Limits()).matcher()
        walked = vocabularies.walk(compiler(), matcher, draw, draw.randint(1, 12), ends=0)
        cut = bytes(each for each in walked if each < 256)
        end, by_rules = model(lark).end(cut), ends(Ebnf(grammar.in_gbnf())).of(cut)
        assert end.text is not None, (lark, cut)
        assert by_rules is not None
        assert accepts(lark, cut + end.text)
        assert grammar.derives((cut + end.text).decode())
        proven, longer = proven + end.proven, longer + (len(end.text) > len(by_rules))
        shorter = (
            "".join(each).encode()
            for n in range(min(len(end.text), 3))
            for each in itertools.product("abcé()+", repeat=n)
        )
        assert not end.proven or not any(accepts(lark, cut + each) for each in shorter if len(each) < len(end.text))
    assert proven > 0.9 * number
    assert longer


@pytest.mark.parametrize(
    ("cut", "length"),
    [
        ("bé)abaab+babcé+((a++é+++))b++((aé((c", 41),
        ("++a)a+a)bbb+)+)+((+++éaé+é+((béba))+", 69),
    ],
)
def test_a_shortest_end_is_found_where_most_texts_of_the_rules_are_read_otherwise(cut: str, length: int):
    finisher = Finisher()
    end = finisher.shortest_end(Lark(AMBIGUOUS), cut.encode())
    assert end is not None
    assert len(end) == length
    assert finisher.found == {"by longest match": 1}


def test_that_no_end_exists_is_proven():
    grammar = 'start: word "a"\nword: /a+/'
    assert ends(Ebnf('root ::= [a]+ "a"')).of(b"aa") == b""
    end = model(grammar).end(b"aa")
    assert end.text is None
    assert end.proven
    assert not any(accepts(grammar, b"a" * times) for times in range(30))


def test_an_ignored_terminal_may_separate_two_others():
    grammar = 'start: "a" "b" | "abcd"\n%ignore " "'
    end = model(grammar).end(b"a")
    assert end.text == b" b"
    assert end.proven
    assert accepts(grammar, b"a b")
    assert not accepts(grammar, b"ab")
