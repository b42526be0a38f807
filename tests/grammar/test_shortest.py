"""The shortest ends of cut texts: compared with every text of small grammars, and ends of constraints of each kind."""

from __future__ import annotations

import itertools
import json
import random
from typing import TYPE_CHECKING

import pytest

from infd.constraint import Choice, Ebnf, JsonSchema, Lark, Regex
from infd.grammar import constraint_rules, ebnf
from infd.grammar.protocol import Limits
from infd.grammar.rules import trimmed
from tests.grammar.ambiguous_grammars import draw_grammar
from tests.grammar.finishing import Finisher
from tests.grammar.shortest import ShortestEnd

if TYPE_CHECKING:
    from infd.constraint import Constraint


def ends(constraint: Constraint) -> ShortestEnd:
    return ShortestEnd(constraint_rules.write(constraint, Limits(), lambda mark: None))


def test_no_text_of_an_ambiguous_grammar_ends_earlier():
    draw, compared = random.Random(3), 0
    while compared < 300:
        grammar = draw_grammar(draw)
        derived = [grammar.sentence(draw) for _ in range(4)]
        if max(map(len, derived)) > 8:
            continue
        rules = trimmed(ebnf.parse(grammar.in_gbnf(), Limits()))
        assert rules is not None
        search = ShortestEnd(rules)
        for text in derived:
            cut = text[: draw.randint(0, len(text))]
            found = search.of(cut.encode())
            assert found is not None
            end = found.decode()
            assert grammar.derives(cut + end)
            assert len(found) <= len(text[len(cut) :].encode())
            shorter = (
                "".join(each) for n in range(min(len(found), 3)) for each in itertools.product("abcéèü€()+", repeat=n)
            )
            assert not any(grammar.derives(cut + each) for each in shorter if len(each.encode()) < len(found))
            compared += 1


def test_where_the_longest_terminals_refuse_the_rules_end_the_shortest_that_they_accept_is_found():
    grammar, finisher = '("a" | "ab") "b" ("c" | "abab") ("b" | "é")', Finisher()
    constraint, alike = Lark(f"start: {grammar}"), Ebnf(f"root ::= {grammar}")
    for cut, by_rules, accepted in ((b"", b"abcb", 5), (b"a", b"bcb", 4), (b"abba", b"babb", 4)):
        found = finisher.shortest_end(constraint, cut, (), alike)
        assert ends(alike).of(cut) == by_rules
        assert found is not None
        assert len(found) == accepted
    assert finisher.found == {"by longest match": 2, "by rules": 1}


def test_where_each_of_many_parts_refuses_the_rules_end_a_shortest_is_found():
    part, finisher = '("a" | "ab") "b" ("c" | "abab") ("b" | "é")', Finisher()
    grammar = " ".join([part] * 8)
    constraint, alike = Lark(f"start: {grammar}"), Ebnf(f"root ::= {grammar}")
    found = finisher.shortest_end(constraint, b"a", (), alike)
    by_rules = ends(alike).of(b"a")
    assert by_rules is not None
    assert len(by_rules) == 8 * 4 - 1
    assert len(found) == 8 * 5 - 1  # one byte more in each part
    assert finisher.found == {"by longest match": 1}


SCHEMA = json.dumps(
    {
        "properties": {"a": {"items": {"type": "string", "minLength": 2}, "minItems": 2, "type": "array"}, "b": True},
        "required": ["a", "b"],
        "type": "object",
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("constraint", "cut", "end"),
    [
        (Regex("a[^x]*bcd"), b"a" + b"fr" * 500 + b"b", b"cd"),
        (Regex("a日+"), "a日日".encode()[:-2], b"\x97\xa5"),
        (Regex("[à-ü]x"), "é".encode()[:1], b"\xa0x"),
        (Regex("a{3}"), b"b", None),
        (Regex("a{3}"), b"aaaa", None),
        (Regex("a"), b"\xff", None),
        (Choice(("one", "onerous")), b"oner", b"ous"),
        (Ebnf('root ::= "a" root root "b" | "c"'), b"aaa", b"ccbcbcb"),
        (JsonSchema(SCHEMA), b'{"a": ["x', b'a","aa"],"b":0}'),
        (JsonSchema(SCHEMA), b'{"a": ["xx\\', b'"","aa"],"b":0}'),
    ],
)
def test_a_cut_text_ends_along_a_shortest_path(constraint: Constraint, cut: bytes, end: bytes | None):
    found = ends(constraint).of(cut)
    if end is None:
        assert found is None
    else:
        assert found is not None
        assert len(found) == len(end)
