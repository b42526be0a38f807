"""Regular expressions of clients: malformed ones are refused by name and path, others read as Python's `re` does."""

from __future__ import annotations

import json
import re
import warnings

import pytest

from infd.constraint import Constraint, JsonSchema, Regex, StructuralTag
from infd.errors import GrammarFailed
from infd.grammar.binding import Library, error_of
from infd.grammar.llguidance import FUEL
from infd.grammar.protocol import Limits
from infd.grammar.regex_syntax import spelled
from infd.grammar.unicode_names import BINARY, CATEGORIES, SCRIPTS, known
from infd.grammar.writing import encoded, listed
from tests.grammar import engines, vocabularies

pytestmark = pytest.mark.usefixtures("engine")

MALFORMED = {
    "(": "a ) is missing",
    "a)": "a ) too many",
    "(?<n": "a group of no known kind",
    "(?<1>a)": "a group of no known kind",
    "(?<n>a)(?<n>b)": "two groups with the name n",
    "(?z)a": "a group of no known kind",
    "(?R)": "a group of no known kind",
    "(?#c)a": "a group of no known kind",
    "(?>a)": "a group of no known kind",
    "(?P=n)": "a group of no known kind",
    "[": "a ] is missing",
    "[]": "a ] is missing",
    "[^]": "a ] is missing",
    "[a\\": "a backslash at the end",
    "[b-a]": "a range that is empty",
    r"[\d-z]": "a range from or to a class",
    r"[\Q]": r"\Q is no known escape",
    r"[\B]": r"\B in a class",
    "*": "* repeats nothing",
    "a|+": "+ repeats nothing",
    "(?)": "a group of no known kind",
    "^*": "* repeats nothing",
    "{1}": "{ repeats nothing",
    "a**": "a repetition repeats a repetition",
    "a{2}{3}": "a repetition repeats a repetition",
    "x{1}*": "a repetition repeats a repetition",
    "a{2,1}": "{2,1} is empty",
    "a{,3}": "write {0,n}",
    "a\\": "a backslash at the end",
    r"\Q": r"\Q is no known escape",
    r"\R": r"\R is no known escape",
    r"\u12": r"\u is no known escape",
    r"\x1": r"\x is no known escape",
    r"\p": r"\p is no known escape",
    r"\p{Foo}": r"\p{Foo} is no set of characters; known are general categories",
    r"\P{sc=Lu}": r"\P{sc=Lu} is no set of characters",
    r"[a\pX]": r"\pX is no set of characters",
    r"\c1": r"\c is no known escape",
    r"\u{110000}": "is no character",
    r"\ud800": "is no character",
}
UNSUPPORTED = {
    "a++": "a possessive repetition",
    "a{2}+": "a possessive repetition",
    r"(a)\1": "a back-reference",
    "(?P<n>a)\\k<n>": "a back-reference",
    r"\01": "an octal number",
    "(?m)^a$": "(?m)",
    "[[:alpha:]]": "a class by name",
}
TEXTS = [
    "",
    "a",
    "ab",
    "aa",
    "{",
    "a{",
    "a{x}",
    "a{1",
    "}",
    "]",
    "<",
    "x<y>",
    "\x01",
    "-",
    "[",
    "&",
    "a&b",
    "\x08",
    "A",
    "é",
    "~",
    "+",
    "/",
]
READ_ALIKE = [
    *("{", "a{", "a{x}", "a{1", "}", "]", r"x\<y\>", r"\x01", r"a\Z", r"\Aa", "[a&&b]+", "[a~~b]", "[[a]+", "[]a]"),
    *("[!--]+", "[--/]"),
    *("[^]a]", r"[\b]", "[a-]", "[-a]", "a|", "()", "(a|b)*?", "(?i)a", "(?i:A)b", "a{1,2}", "a{0}", r"\{", r"[\-a]"),
    *(r"[\&]", "(?:a)+"),
]  # fmt: skip


@engines.each
def compiler():
    return engines.compiler(vocabularies.byte_level(0))


def refusal(constraint: Constraint) -> GrammarFailed:
    with pytest.raises(GrammarFailed) as failed:
        compiler().compile(constraint, Limits())
    return failed.value


@pytest.mark.parametrize(("pattern", "reason"), [*MALFORMED.items(), *UNSUPPORTED.items()])
def test_a_pattern_that_cannot_be_kept_is_refused_with_its_reason_and_path(pattern: str, reason: str):
    code = "invalid_grammar" if pattern in MALFORMED else "unsupported_grammar"
    schema = {"properties": {"x": {"pattern": pattern}}, "required": ["x"]}
    keyed = {"patternProperties": {pattern: {"type": "null"}}}
    tag = {"type": "regex", "pattern": pattern}
    for constraint, place in [
        (Regex(pattern), "the pattern "),
        (JsonSchema(json.dumps(schema)), "the schema at #/properties/x/pattern: the pattern "),
        (JsonSchema(json.dumps(keyed)), "the schema at #/patternProperties/"),
        (StructuralTag(json.dumps({"format": tag})), "the pattern "),
    ]:
        error = refusal(constraint)
        assert error.code == code
        assert reason in str(error)
        assert str(error).startswith(place)


def test_an_unpaired_surrogate_in_a_schema_is_refused():
    for schema in (
        {"pattern": "\ud800"},
        {"enum": ["\ud800"]},
        {"required": ["\ud800"]},
        {"properties": {"\ud800": {}}},
    ):
        error = refusal(JsonSchema(json.dumps(schema)))
        assert (str(error), error.code) == ("the constraint is not valid Unicode", "invalid_grammar")


@pytest.mark.parametrize("pattern", READ_ALIKE)
def test_a_pattern_is_read_as_by_python(pattern: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sets within sets
        expected = [text for text in TEXTS if re.fullmatch(pattern, text)]
    grammar = compiler().compile(Regex(pattern), Limits())
    ids = {piece: token for token, piece in enumerate(compiler().vocabulary.tokens) if len(piece) == 1}

    def accepted(text: str) -> bool:
        matcher, tokens = grammar.matcher(), [ids[bytes([byte])] for byte in text.encode()]
        if matcher.validate(tokens) < len(tokens):
            return False
        matcher.advance(tokens)
        return matcher.accepting

    assert [text for text in TEXTS if accepted(text)] == expected


def test_reading_takes_linear_time():
    for pattern in ("a" * 200_000, "(?:a)" * 50_000, "[a-z]" * 50_000, "{" * 200_000, "\\" * 200_000, "a{1" * 50_000):
        assert spelled(pattern)
    for pattern in (
        "[" * 200_000,
        "(?<" * 50_000,
        "a{" + "1" * 200_000,
        "(" * 200_000,
        "[a" * 100_000,
        r"\u{" * 50_000,
    ):
        with pytest.raises(GrammarFailed):
            spelled(pattern + "(")


def test_names_of_properties_are_known_as_llguidance_knows_them():
    library = Library()
    vocabulary = library.vocabulary([bytes([byte]) for byte in range(255)], [])

    def accepted(name: str) -> bool:
        grammar = {"lark_grammar": rf"start: /\p{{{name}}}?/"}
        matcher = library.matcher(vocabulary, listed([encoded(grammar)]), FUEL)
        return error_of(library.functions, matcher) is None

    names = [
        *CATEGORIES,
        *SCRIPTS,
        *BINARY,
        "Foo",
        "is_greek",
        " is Greek",
        "isc",
        "is_c",
        "iS Lu",
        "L&",
        "^L",
        "",
        "!Lu",
    ]
    names += [
        "Cs",
        "Any",
        "ASCII",
        "L u",
        "GreeK",
        "white-space",
        "InGreek",
        "Zzzz",
        "Unknown",
        "alnum",
        "word",
        "digit",
    ]
    names += [f"{key}{sign}{value}" for key in ("gc", "Script") for sign in "=:" for value in ("Lu", "Greek", "no", "")]
    names += [
        "scx=Grek",
        "Script_Extensions=Greek",
        "General Category!=L",
        "gc=L=u",
        "Block=Greek",
        "gc=is_Lu",
        "sc!=no",
    ]
    assert {name for name in names if known(name)} == {name for name in names if accepted(name)}
