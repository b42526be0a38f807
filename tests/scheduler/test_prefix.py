"""A page is found by all of its tokens and all before them: nothing that merely collides with them finds it."""

from __future__ import annotations

import struct
import subprocess
import sys
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from infd.request import Request
from infd.scheduler.prefix import page_keys
from infd.scheduler.sequence import Sequence

PAGE = 4
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5 * PAGE)


def keys(tokens: list[int], root: bytes = b"") -> list[bytes]:
    request = Request(id="r", prompt=tuple(tokens), wants=())
    return page_keys(Sequence(request, prefix_root=root), PAGE)


@settings(deadline=None)
@given(TOKENS, st.binary(max_size=16))
def test_a_key_is_a_blake2b_over_the_pages_tokens_and_the_key_before_it(tokens: list[int], root: bytes):
    key, expected = root, []
    for page in range(len(tokens) // PAGE):
        key = blake2b(key + struct.pack("=4i", *tokens[page * PAGE : (page + 1) * PAGE]), digest_size=16).digest()
        expected.append(key)

    assert keys(tokens, root) == expected


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), min_size=PAGE, max_size=5 * PAGE), st.data())
def test_a_token_that_differs_changes_the_key_of_its_page_and_of_all_behind_it(tokens: list[int], data: st.DataObject):
    place = data.draw(st.integers(0, len(tokens) // PAGE * PAGE - 1))
    other = data.draw(st.integers(0, 2**31 - 1).filter(lambda token: token != tokens[place]))
    changed = [*tokens[:place], other, *tokens[place + 1 :]]

    same = [mine == theirs for mine, theirs in zip(keys(tokens), keys(changed), strict=True)]

    assert same == [page < place // PAGE for page in range(len(tokens) // PAGE)]


def test_keys_do_not_depend_on_how_a_process_hashes():
    """Python's own hash() is 61 bits, the same for a number and that number plus 2**61 - 1, and differs by process."""
    script = """
from tests.scheduler.test_prefix import keys
print(keys([1, 2, 3, 4], b"root")[0].hex())
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip

    assert said == {keys([1, 2, 3, 4], b"root")[0].hex()}


@settings(deadline=None)
@given(TOKENS, TOKENS, st.booleans())
def test_a_prompt_that_continues_another_has_the_keys_of_its_own_tokens(
    tokens: list[int], more: list[int], reset: bool
):
    before = Sequence(Request(id="r", prompt=tuple(tokens), wants=()), prefix_root=b"0")
    page_keys(before, PAGE)
    before.tokens += [5] * PAGE  # what it generates is not what the other continues with
    page_keys(before, PAGE)
    root = b"1" if reset else b"0"
    after = Sequence(Request(id="r", prompt=(*tokens, *more), wants=()), prefix_root=root)
    after.continue_from(before)

    assert bool(after.keys.get(PAGE)) == (len(tokens) >= PAGE and not reset)
    assert page_keys(after, PAGE) == keys([*tokens, *more], root)
