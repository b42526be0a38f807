"""Proofs about regular expressions agree with Python's matches of short texts."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infd.grammar.schema.languages import Languages

TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("ab1\n", repeat=length)]
ATOMS = st.sampled_from(["a", "b", "1", "[ab]", "[^a]", ".", r"\w", r"\d", r"\D", "^", "$", "[a-c1]", r"\n", r"[\s\S]"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: (
        st.builds("{}{}".format, inner, inner)
        | st.builds("(?:{}|{})".format, inner, inner)
        | st.builds("(?:{}){}".format, inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}", "*?"]))
    ),
    max_leaves=6,
)
ANCHORED = st.builds("{}{}{}".format, st.sampled_from(["", "^"]), EXPRESSIONS, st.sampled_from(["", "$"]))


def matched(pattern: str) -> set[str]:
    expression = re.compile(pattern.replace("$", r"\Z"))
    return {text for text in TEXTS if expression.search(text)}


@settings(max_examples=200, deadline=None)
@given(ANCHORED, ANCHORED)
def test_a_proof_of_disjointness_holds_for_all_short_texts(one: str, other: str):
    if Languages().disjoint([one, other]) or Languages().disjoint([one, r"^[ab1\n]{0,4}$", other]):
        assert not matched(one) & matched(other)
    else:
        assert matched(one) & matched(other)


@settings(max_examples=200, deadline=None)
@given(ANCHORED, st.lists(st.sampled_from(TEXTS), max_size=20))
def test_matches_are_those_of_python(pattern: str, texts: list[str]):
    languages, expected = Languages(), matched(pattern)
    for text in texts:
        assert languages.matches(pattern, text) == (text in expected)


@pytest.mark.parametrize(
    ("patterns", "disjoint"),
    [
        ((r"^(?:(?:>=|>)\d+\.\d+\s*)+$", r"^\^\d+\.\d+$"), True),
        ((r"^\d+$", r"^\D+$"), False),  # "٣" is a digit to some dialects
        ((r"^.$", r"^[\r]$"), False),  # a carriage return is a `.` to some dialects
        ((r"^[^\x00a]$", "^\x00$"), False),  # U+0000 is taken out of negated classes
        (("a", "b"), False),
        (("^a", "^b"), True),
        (("a$", "b$"), True),
        ((r"^(?=a)", "^b"), False),  # look-ahead is unreadable
        ((r"^(a|b){1,200}$", "^(a|b){201,300}$"), True),
        (("^(" + "a?" * 50 + "){50}$", "^b$"), False),  # too large
        (("", r"^[\s\S]*$"), False),
        ((r"^[^\p{L}]$", "^1$"), False),
    ],
)
def test_disjointness_is_proved_or_not(patterns: tuple[str, ...], disjoint: bool):
    assert Languages().disjoint(patterns) == disjoint


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (r"^\d$", "٣", None),
        (r"^\d$", "3", True),
        (r"^\d$", "x", False),
        (r"^.$", "\r", None),
        ("(a)\\1", "aa", None),
        (r"^[\p{L}]$", "1", None),
    ],
)
def test_a_match_on_which_dialects_differ_is_unknown(pattern: str, text: str, matches: bool | None):
    assert Languages().matches(pattern, text) is matches


def test_all_proofs_together_end_within_a_bound():
    languages = Languages()
    started = time.process_time()
    for number in range(2000):
        languages.disjoint([rf"^(?:[ab]*a[ab]{{12}}|{number})$", rf"^(?:[ab]*b[ab]{{12}}|x{number})+$"])
        languages.matches(r"^(a|a)*(a|a)*(a|a)*$", "a" * number + "b")
    assert time.process_time() - started < 5
