"""An outline tells from a schema alone what a JSON answer goes on with, in the answer's own white space."""

from __future__ import annotations

import json
import random

import pytest

from infd import embedded
from infd.drafting.drafter import LIKELY, NO_DRAFTS
from infd.drafting.forced import ForcedDrafter
from infd.drafting.ngram import NgramDrafter
from infd.grammar.outline import MOST_OPEN, Outline, Place
from infd.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(embedded.path())
SPELLINGS = TOKENIZER.spellings()
assert SPELLINGS is not None
STRING, NUMBER, EITHER = {"type": "string"}, {"type": "integer"}, {"anyOf": [{"type": "null"}, {"enum": ["x"]}]}
ORDER = {"type": "object", "properties": {"town": STRING, "count": NUMBER, "note": EITHER, "paid": {"type": "boolean"}}}
SCHEMA = {
    "type": "object",
    "properties": {"orders": {"type": "array", "items": {"$ref": "#/$defs/Order"}}, "names": {"type": "array"}},
    "$defs": {"Order": ORDER},
}


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def text_of(tokens: list[int]) -> str:
    assert SPELLINGS is not None
    return b"".join(SPELLINGS[token] for token in tokens).decode()


def outline(schema: object = SCHEMA, *, whitespace: bool = True) -> Outline:
    assert SPELLINGS is not None
    return Outline(schema, SPELLINGS, encode, whitespace=whitespace)


def behind(text: str, schema: object = SCHEMA, *, whitespace: bool = True) -> Place:
    place = Place(outline(schema, whitespace=whitespace))
    for character in text:  # token by token, none of which is known to be the tokenizer's
        place.read(encode(character))
    return place


ONE = '{"orders": [{"'
LINES = '{\n    "orders": [\n        {\n            "town": "Lyon'
ODD = '{"orders":[ {"town" : "a" , "count" : 7'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"', 'orders": [{"town": "'),
        ('{"ord', 'ers": [{"town": "'),
        (ONE + "to", 'wn": "'),
        (ONE + 'town": "Lyon"', ', "count": '),
        (ONE + 'town": "Lyon",', ' "count": '),
        (ONE + 'town": "a \\"b\\"", "co', 'unt": '),
        (ONE + 'town": "a", "count": 7,', ' "note":'),
        (ONE + 'town": "a", "count": 7, "note": null,', ' "paid":'),  # ` true` is a token
        (ONE + 'town": "a", "count": 7, "note": null, "paid": true', ""),  # a token shows whether a word ends
        (ONE + 'town": "a", "count": 7, "note": null, "paid": true}', ', {"town": "'),
        (ONE + 'town": "a", "count": 7, "note": null, "paid": true}]', ', "names":'),
        (ONE + 'count": 7,', ' "note":'),  # a property is left out
        (LINES + '",', '\n            "count": '),
        (LINES + '",\n     ', '       "count": '),
        (LINES + '", "count": 7, "note": null, "paid": true\n        }', ',\n        {\n            "town": "'),
        (ODD + " ,", ' "note" :'),
        (
            "{\n ",
            ' "orders": [\n    {\n      "town": "',
        ),  # two spaces, until lines show another way
        ("", '{\n  "orders": [\n    {\n      "town": "'),
    ],
)
def test_a_text_goes_on_to_the_next_value(text: str, expected: str):
    guess = behind(text).guess(40)
    assert text_of(guess) == expected
    assert guess == encode(expected), "as the tokenizer writes it"


@pytest.mark.parametrize("text", [ONE + 'town": "Ly', ONE + 'town": "a", "count": 7'])
def test_within_a_value_nothing_is_told(text: str):
    place = behind(text)
    assert place.known
    assert place.guess(8) == []


def test_without_white_space_none_is_told():
    assert text_of(behind('{"', whitespace=False).guess(24)) == 'orders":[{"town":"'


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (ONE + 'town": "a", "count": 7, "note":', False),
        (ONE + 'town": "a", "count": 7, "note": nu', False),
        (ONE + 'town": "a", "count": 7, "note": null,', True),
        (ONE + 'other": {"town": [1, {"a": 2}', False),
        (ONE + 'other": {"town": [1, {"a": 2}]}', True),
        ('{"names": ["a"', False),
        ("no JSON", False),
        ('{"orders" "', False),
        ('{"orders": [{"town": "a"]}', True),
    ],
)
def test_other_parts_of_a_schema_are_not_known(text: str, known: bool):
    place = behind(text)
    assert place.known == known
    assert known or place.guess(8) == []


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        None,
        {"type": ["object", "null"], "properties": {"a": {}}},
        {"$ref": "#"},
        {"$ref": "#/$defs/a/b"},
        {"$ref": 7},
        {"type": "object"},
        {"type": "array", "items": False},
        {"type": "object", "properties": {"a": {}}, "allOf": [{}]},
    ],
)
def test_a_schema_without_an_outline_tells_nothing(schema: object):
    place = behind('{"a', schema)
    assert not place.known
    assert place.guess(8) == []


@pytest.mark.parametrize("last", [True, None, [], {"$ref": "#/$defs/0"}])
def test_a_chain_of_references_may_end_anywhere(last: object):
    for length in range(1, 12):
        links = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(length)}
        schema = {"$ref": "#/$defs/0", "$defs": {**links, str(length): last}}
        assert not behind("", schema).guess(64)
        nested = {"type": "object", "properties": {"a": schema}, "$defs": schema["$defs"]}
        assert not behind('{"a":', nested).guess(64)


def test_a_name_that_utf_8_has_not_is_not_drafted():
    schema = json.loads('{"type": "object", "properties": {"\\ud800": {"type": "string"}}}')
    assert not behind("", schema, whitespace=False).guess(64)


def test_what_was_written_before_is_likely_and_what_is_assumed_is_not():
    known = {text: (behind(text).guess(8), behind(text)) for text in ("{", ONE + 'town": "a",', LINES + '",')}
    likely = {}
    for text, (guess, place) in known.items():
        assert place.guess(8) == guess
        likely[text] = place.likely
    assert likely == {"{": False, ONE + 'town": "a",': True, LINES + '",': True}
    place = behind(ONE + 'town": "a", "count": 7, "note": null, "paid": true}')
    assert place.guess(8)
    assert not place.likely, "the array may end"


def test_a_draft_that_ends_a_value_goes_on_as_the_schema_tells():
    place = behind(ONE + 'town": "Ly')
    assert text_of(place.extended(encode('on", "other'), 24)) == 'on", "count": '
    assert text_of(place.extended(encode("on is"), 24)) == "on is"
    assert len(place.extended(encode('on", "other'), 5)) == 5
    place = behind(ONE + 'town": "a", "count": 7')
    assert text_of(place.extended(encode("50, 9"), 24)) == '50, "note":'


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        (" times", ', "note":'),
        ("50 times", '50, "note":'),
        ("5. On", '5, "note":'),
        ("5.25", "5.25"),
        ("", ', "note":'),
    ],
)
def test_a_number_ends_before_a_draft_that_is_none_or_if_there_is_no_draft(drafts: str, expected: str):
    place = behind(ONE + 'town": "a", "count": 7')
    assert text_of(place.extended(encode(drafts), 24)) == expected
    assert len(place.extended(encode(drafts)[:2], 2)) == 2


def test_what_follows_a_number_by_the_schema_is_not_taken_for_a_run_that_occurred_before():
    drafter = ForcedDrafter(NgramDrafter())
    prompt = encode(" of 7 times")
    drafter.follow(lambda: Place(outline()), len(prompt))
    answer = encode(ONE + 'town": "a", "count": 7')
    assert text_of(drafter.draft([*prompt, *answer], 8)) == ', "note":'
    assert drafter.run == 0


def test_any_text_is_read():
    draw = random.Random(4)
    pieces = ["{", "}", "[", "]", '"', ",", ":", " ", "\n", "\\", "7", "true", "orders", '"town"', "é", LINES, ODD]
    for _ in range(3000):
        place = Place(outline())
        for _ in range(draw.randrange(12)):
            place.read(encode(draw.choice(pieces)))
        guess = place.guess(draw.randrange(1, 9))
        place.copy().read(guess)
        place.extended(encode(draw.choice(pieces)), 8)


def test_whatever_a_guess_continues_is_json():
    place, tokens = Place(outline()), []
    values = iter(["Lyon", "7,", "null,", "true}]", ' ["a"]}'])
    while (guess := place.guess(24)) or (value := next(values, None)) is not None:
        new = guess or encode(value + ('"' if value == "Lyon" else ""))
        place.read(new)
        tokens += new
        if text_of(tokens).endswith('"names":'):
            new = encode(next(values))
            place.read(new)
            tokens += new
    found = json.loads(text_of(tokens))
    assert found == {"orders": [{"town": "Lyon", "count": 7, "note": None, "paid": True}], "names": ["a"]}


def test_arrays_within_each_other_are_known_up_to_a_depth_so_that_a_step_copies_few():
    place = Place(outline({"type": "array", "items": {"$ref": "#"}}))
    for _ in range(MOST_OPEN):
        place.read(encode("["))
        assert place.known
    place.read(encode("["))
    assert not place.known
    assert place.guess(8) == []


def test_a_place_in_the_answer_is_drafted_from_and_its_values_by_another_drafter():
    prompt = encode("Lyon is a town.")
    drafter = ForcedDrafter(NgramDrafter(len(prompt)))
    drafter.follow(lambda: Place(outline()), len(prompt))
    tokens = [*prompt, *encode('{"orders": [{"')]
    assert text_of(drafter.draft(tokens, 8)) == 'town": "'
    assert (drafter.run, drafter.sure, drafter.foretold) == (LIKELY, False, True)
    tokens += encode('town": "Lyon is')
    assert text_of(drafter.draft(tokens, 3)) == " a town"
    assert 1 < drafter.run < LIKELY
    drafter.draft([*tokens, *encode("{"), *encode('", "note":')], 2)
    assert not drafter.foretold, "a name that the object's outline does not expect there"
    assert not ForcedDrafter(NO_DRAFTS).foretold
