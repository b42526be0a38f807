"""Drafters find what followed before, in constant time and bounded memory, and share nothing between prefix roots."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from infd.config import SchedulerConfig
from infd.drafting.drafter import LIKELY, NO_DRAFTS, RUN
from infd.drafting.forced import ForcedDrafter
from infd.drafting.ngram import NgramDrafter
from infd.drafting.occurrences import AT_ONCE, MOST_INDEXED, Occurrences
from infd.drafting.prediction import PredictionDrafter
from infd.drafting.select import drafting
from infd.drafting.suffix import LONGEST, SuffixDrafter, SuffixDrafting
from infd.drafting.trail import AHEAD
from infd.request import Request


def request(prompt: list[int]) -> Request:
    return Request(id="r", prompt=tuple(prompt), wants=())


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2]),  # the latest occurrence
        ([7, 1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4], [5, 9, 3]),  # the longest run
        ([1, 2, 3, 4], []),
        ([1], []),
        ([1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5], [6, 9, 2]),  # a longer run of which the end came later
        ([5, 6, 7, 5, 6, 7], [5, 6, 7]),
        ([5, 5, 5], [5, 5, 5]),  # behind the text's end the loop goes on
        ([8, 4, 4, 4], [4, 4, 4]),
    ],
)
def test_ngrams_draft_the_tokens_that_followed_the_last_ones_before(tokens, expected):
    assert NgramDrafter().draft(tokens, 3) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([1, 2, 3, 9, 3], 1), ([1, 2, 3, 9, 2, 3], 2), ([*range(30), *range(30)], RUN), ([1, 2], 0)],
)
@pytest.mark.parametrize("drafter", [NgramDrafter, lambda: SuffixDrafting(7, 2**20).drafter(request([]), b"")])
def test_a_drafter_reports_the_length_of_the_run_that_its_draft_followed(drafter, tokens, expected):
    drafts = drafter()
    drafts.draft(tokens, 3)
    forced = ForcedDrafter(drafter())
    forced.draft(tokens, 3)
    assert drafts.run == forced.run == expected


# Records of a prompt: `of` NAME `in` TOWN, NAME of two tokens; 1 stands for `of`, 2 for `in`.
RECORDS = [1, 10, 11, 2, 20, 1, 12, 13, 2, 21, 1, 14, 15, 2, 22, 1, 16, 17, 2, 23]


def drafts_behind(answer: list[int], most: int = 3, prompt: list[int] = RECORDS) -> list[int]:
    """Return what is drafted behind an answer that is written token by token."""
    drafter, found = NgramDrafter(len(prompt)), []
    for _ in range(0, len(prompt), AT_ONCE):
        drafter.draft(prompt, most)
    for end in range(len(answer) + 1):
        found = drafter.draft([*prompt, *answer[:end]], most)
    return found


def test_a_value_is_copied_from_the_next_record_and_ends_where_the_ones_before_ended():
    assert drafts_behind([10, 11, 8, 12]) == [13, 2, 21], "one end of a name might be by chance"
    assert drafts_behind([10, 11, 8, 12, 13, 8], 3) == [14, 15, 8]


def test_the_form_goes_on_behind_a_value_of_which_the_end_was_not_known():
    prompt = [1, 10, 5, 2, 20, 1, 11, 6, 2, 21, 1, 12, 7, 2, 22]  # no name ends before the same token
    answer = [9, 8, 10, 8, 20, 9, 8, 11, 8]
    assert drafts_behind(answer, 1, prompt) == [21]
    assert drafts_behind([*answer, 21, 9, 8, 12, 8], 1, prompt) == [22]


def test_the_next_value_follows_the_same_two_tokens_if_any_does():
    prompt = [1, 7, 50, 3, 7, 60, 1, 7, 51, 3, 7, 61, 1, 7, 52, 3, 7, 62]
    assert drafts_behind([60, 8], 1, prompt) == []
    assert drafts_behind([60, 8, 61, 8], 1, prompt) == [62]


def test_what_is_replaced_in_an_edited_text_is_replaced_again():
    prompt = [30, 31, 40, 32, 33, 40, 34, 35, 40, 36, 37]
    assert drafts_behind([30, 31, 50, 51, 32, 33, 50, 51, 34, 35], 3, prompt) == [50, 51, 36]


def test_a_token_that_is_copied_again_is_no_longer_replaced():
    prompt = [0, 30, 40, 31, 41, 32, 33, 40, 34, 41, 35, 36, 40, 37, 41, 38, 39, 40, 28]
    answer = [30, 50, 31, 60, 32, 33, 50, 34, 60, 35, 36]
    assert drafts_behind(answer, 1, prompt) == [50]
    assert drafts_behind([*answer, 40, 37], 1, prompt) == [60]
    assert drafts_behind([*answer, 40, 37, 60, 38, 39], 2, prompt) == [40, 28]


def test_replacements_that_were_wrong_are_not_expected_elsewhere():
    prompt = [0, 30, 40, 31, 41, 32, 42, 33, 34, 40, 35, 41, 36, 42, 37]
    answer = [30, 50, 31, 60, 32, 70, 33, 34, 50, 35]
    assert drafts_behind(answer, 1, prompt) == [60]
    assert drafts_behind([*answer, 41, 36], 1, prompt) == [42]


def test_a_value_that_is_copied_from_elsewhere_is_followed_there():
    assert drafts_behind([10, 11, 8, 12, 13, 8, 16, 17], 2) == [8, 16]
    assert drafts_behind([10, 11, 8, 12, 13, 8, 16], 1) == [17]


def test_a_prompt_is_copied_in_its_order():
    prompt = [0, 1, 5, 10, 2, 6, 20, 3, 5, 30, 4, 5, 40, 7, 8]
    assert drafts_behind([5], 1, prompt) == [10]
    assert drafts_behind([2, 6, 20, 9, 5], 1, prompt) == [30]
    assert NgramDrafter(len(prompt)).draft([*prompt, 4, 5], 1) == [40], "a longer run"
    assert drafts_behind([40, 7, 9, 5], 1, prompt) == [40], "behind the text copied last there is none"


def test_the_order_of_a_long_prompt_is_followed_near_the_text_copied_last():
    prompt = [0, *range(1000, 1000 + AHEAD), 5, 10, *range(2000, 2000 + AHEAD), 5, 20, 6, 5, 30]
    assert drafts_behind([5], 1, prompt) == [30]
    assert drafts_behind([1000 + AHEAD - 1, 9, 5], 1, prompt) == [10]
    assert drafts_behind([2000 + AHEAD - 1, 9, 5], 1, prompt) == [20]


def test_a_run_before_an_earlier_answers_continuation_is_compared_with_that_answer():
    suffixes = SuffixDrafting(most=7, limit=2**20)
    suffixes.drafter(request([]), b"root").finish([8, 1, 2, 30, 31, 32, 33])
    drafter = suffixes.drafter(request([]), b"root")
    assert drafter.draft([9, 1, 2, 30], 7) == [31, 32, 33]
    assert drafter.run == 3


def test_a_text_that_grows_is_read_token_by_token():
    text = [(i * i) % 11 for i in range(200)]
    growing = NgramDrafter()
    for end in range(1, len(text)):
        assert growing.draft(text[:end], 4) == NgramDrafter().draft(text[:end], 4)


def test_a_call_reads_a_bounded_number_of_tokens():
    seen, text = Occurrences(2), list(range(3 * AT_ONCE))
    seen.extend(text, len(text))
    assert seen.read == AT_ONCE
    for _ in range(2):
        seen.extend(text, len(text))
    assert seen.find([7, 8], text) == (2, 9)
    assert seen.find([len(text) - 2, len(text) - 1], text) == (2, len(text))


def test_earlier_answers_of_an_equal_root_are_drafted_and_no_others():
    suffixes = SuffixDrafting(most=7, limit=2**20)
    first = suffixes.drafter(request([1, 2]), b"root")
    first.finish([1, 2, 30, 31, 32, 33, 34, 35])
    assert suffixes.drafter(request([9, 30, 31]), b"root").draft([9, 30, 31], 7) == [32, 33, 34, 35]
    assert suffixes.drafter(request([9, 30, 31]), b"other").draft([9, 30, 31], 7) == []
    assert suffixes.drafter(request([5, 1, 2]), b"root").draft([5, 1, 2], 7) == [], "prompts are not remembered"


def test_a_longer_run_brings_more_drafts():
    suffixes = SuffixDrafting(most=15, limit=2**20)
    text = list(range(100, 140))
    suffixes.drafter(request([]), b"").finish(text)
    assert len(suffixes.drafter(request([]), b"").draft(text[8:10], 15)) == 4
    assert len(suffixes.drafter(request([]), b"").draft(text[2:10], 15)) == 15
    own = [*range(1, 20), 1, 2]
    assert suffixes.drafter(request(own), b"other").draft(own, 15) == [3, 4, 5, 6]
    assert [len(NgramDrafter().draft([*range(40), *range(1, 1 + run)], 15)) for run in (1, 2, 3)] == [7, 14, 15]


def test_answers_are_forgotten_beyond_the_limit_of_bytes():
    suffixes = SuffixDrafting(most=7, limit=2**20)
    for number in range(40):
        drafter = suffixes.drafter(request([]), bytes([number]))
        answer = [1000 * number + i for i in range(500)]
        drafter.finish(answer)
        assert suffixes.drafter(request([]), bytes([number])).draft(answer[:20], 3) == answer[20:23]
    held = [answers for number in range(40) if (answers := suffixes.answers(bytes([number]))) is not None]
    assert sum(each.bytes for each in held) <= 2**20
    assert suffixes.answers(bytes([39])) is held[-1]
    assert suffixes.answers(bytes([0])) is None


def test_the_root_whose_last_answer_is_oldest_is_forgotten_first():
    suffixes = SuffixDrafting(most=7, limit=9_000)  # two roots of 10 tokens

    def finish(root: bytes, tokens: int) -> None:
        suffixes.drafter(request([]), root).finish(list(range(tokens)))

    finish(b"first", 5)
    finish(b"second", 10)
    finish(b"first", 5)
    finish(b"third", 10)
    assert [suffixes.answers(root) is None for root in (b"first", b"second", b"third")] == [False, True, False]


def test_only_the_beginning_of_a_long_answer_is_remembered():
    suffixes = SuffixDrafting(most=7, limit=2**30)
    for answers in (1, 2):
        suffixes.drafter(request([]), b"").finish(list(range(LONGEST + 100)))
        held = suffixes.answers(b"")
        assert held is not None
        assert len(held.tokens) == answers * LONGEST


def test_a_root_without_an_answer_takes_no_memory():
    suffixes = SuffixDrafting(most=7, limit=2**20)
    for number in range(100):
        suffixes.drafter(request([1]), bytes([number])).finish([1])
    assert not any(suffixes.answers(bytes([number])) for number in range(100))


def test_the_only_root_keeps_its_newer_answers():
    suffixes = SuffixDrafting(most=7, limit=2**18)
    for number in range(8):
        suffixes.drafter(request([]), b"").finish([1000 * number + i for i in range(500)])
    held = suffixes.answers(b"")
    assert held is not None
    assert held.bytes <= 2**18
    assert held.tokens[-1] == 7499
    assert 0 not in held.tokens


def test_only_the_end_of_a_long_prompt_is_read():
    prompt = [1, 2, 3, 4, *range(10, MOST_INDEXED + 10)]
    drafter = NgramDrafter(len(prompt))
    tokens = [*prompt, 1, 2, 3, 4]
    for _ in range(MOST_INDEXED // 128 + 1):
        drafts = drafter.draft(tokens, 2)
    assert drafts == []
    assert drafter.draft([*tokens, 100, 101], 2) == [102, 103]


def test_the_settings_choose_how_tokens_are_drafted():
    assert drafting(SchedulerConfig()) is NO_DRAFTS
    ngram = drafting(SchedulerConfig(speculative="ngram", speculative_tokens=4))
    assert ngram.most == 4
    assert isinstance(ngram.drafter(request([]), b""), NgramDrafter)
    suffix = drafting(SchedulerConfig(speculative="suffix"))
    assert isinstance(suffix.drafter(request([]), b""), SuffixDrafter)
    few = drafting(SchedulerConfig(speculative="suffix", speculative_bytes=2**20))
    for number in range(30):
        answer = [1000 * number + i for i in range(500)]
        few.drafter(request([]), bytes([number])).finish(answer)
    known = [bool(few.drafter(request([]), bytes([n])).draft([1000 * n, 1000 * n + 1], 3)) for n in (0, 29)]
    assert known == [False, True], "speculative_bytes are exceeded"
    predicted = replace(request([1]), prediction=(2, 3))
    assert isinstance(suffix.drafter(predicted, b""), PredictionDrafter)


def followed(prediction: list[int], answer: list[int], most: int = 3) -> list[list[int]]:
    """Return the draft behind each token of an answer to the prompt [90, 91]."""
    drafter = PredictionDrafter(tuple(prediction), 2)  # a request's prediction is a tuple, its tokens are a list
    return [drafter.draft([90, 91, *answer[:end]], most) for end in range(len(answer) + 1)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([1, 2], [[1, 2, 3], [2, 3, 4], [3, 4, 5]]),
        ([1, 77], [[1, 2, 3], [2, 3, 4], [3, 4, 5]]),  # 77 replaces 2
        ([1, 77, 78, 79, 2, 3], [[1, 2, 3], [2, 3, 4], [3, 4, 5], [], [], [], [4, 5, 1]]),  # inserted
        ([1, 2, 1, 2], [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 1], [8, 9]]),  # 3, 4, 5 are left out
        (
            [1, 2, 3, 4, 5, 1, 2, 8, 9],
            [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 1], [5, 1, 2], [1, 2, 8], [2, 8, 9], [8, 9], [9], []],
        ),
    ],
)
def test_a_prediction_is_followed_through_differences(answer, expected):
    assert followed([1, 2, 3, 4, 5, 1, 2, 8, 9], answer) == expected


def test_a_prediction_that_repeats_one_token_is_followed_to_its_end():
    prediction = [5] * 9 + [6, 7, 8]
    assert followed(prediction, prediction) == [prediction[end : end + 3] for end in range(len(prediction) + 1)]


def test_several_new_tokens_are_compared_with_a_prediction_at_once():
    drafter = PredictionDrafter(tuple(range(20)), 1)
    assert drafter.draft([90], 4) == [0, 1, 2, 3]
    assert drafter.draft([90, 0, 1, 2, 3, 4], 4) == [5, 6, 7, 8]
    assert drafter.draft([90, 0, 1, 2, 3, 4, 50, 51, 11, 12], 4) == [13, 14, 15, 16]


def test_forced_tokens_are_drafted_where_the_choice_has_come_as_far_and_others_elsewhere():
    drafter = ForcedDrafter(NgramDrafter())
    drafter.force(3, [4, 5, 6, 7])
    seen = [1, 2, 3]
    assert (drafter.draft([*seen, 4], 2), drafter.sure) == ([5, 6], True)
    assert (drafter.draft([*seen, 4, 5, 6, 7], 2), drafter.sure) == ([], False)
    drafter.force(5, [1, 2, 9])
    assert (drafter.draft([*seen, 4, 8, 1, 2], 1), drafter.sure) == ([9], True)
    drafter.force(5, [1, 9])
    assert (drafter.draft([*seen, 4, 8, 1, 2], 2), drafter.sure) == ([9], True), "an older run agrees"
    assert (drafter.draft([*seen, 4, 8, 2, 3], 2), drafter.sure) == ([4, 8], False)


def test_likely_tokens_of_a_grammar_are_drafted_and_distinguished_from_sure_ones():
    drafter = ForcedDrafter(NgramDrafter())
    drafter.force(3, [4, 5, 6], sure=False)
    assert (drafter.draft([1, 2, 3, 4], 2), drafter.sure, drafter.run) == ([5, 6], False, LIKELY)
    drafter.force(4, [5, 7])
    assert (drafter.draft([1, 2, 3, 4], 2), drafter.sure) == ([5, 7], True)
    assert (drafter.draft([1, 2, 3, 9, 3], 2), drafter.sure, drafter.run) == ([9, 3], False, 1)


def test_forced_tokens_may_be_added_while_they_are_searched():
    drafter = ForcedDrafter(NgramDrafter())

    class Tokens(list):
        def __getitem__(self, part):
            drafter.force(0, [8, 9])  # as the event loop does while the thread for masks searches
            return super().__getitem__(part)

    for _ in range(3):
        drafter.force(1, [7, 7])
    assert drafter.forced(Tokens([1, 2])) == ([], False)


def test_what_follows_a_token_that_ends_a_free_part_is_drafted_behind_the_first_of_them():
    drafter = ForcedDrafter(NgramDrafter())
    drafter.expect(3, {7: [4, 5], 8: [6], 9: []})
    assert drafter.draft([1, 2, 3, 9], 2) == [], "nothing is forced behind 9"
    assert drafter.expects([1, 2, 3, 9, 5])
    assert not drafter.expects([1, 2, 3, 9, 5, 8])
    assert (drafter.draft([1, 2, 3, 9, 7], 2), drafter.run, drafter.sure) == ([4, 5], LIKELY, False)
    assert not drafter.expects([1, 2, 3, 9, 7]), "another free part follows"
    assert drafter.draft([1, 2, 3, 9, 7, 4], 2) == [5]
    assert drafter.draft([1, 2, 3, 9, 7, 4, 5, 6, 8], 2) == []
    drafter.expect(9, {7: []})
    drafter.force(10, [4, 5])
    assert drafter.draft([1, 2, 3, 9, 7, 4, 5, 6, 8, 9], 2) == [4, 5]
    assert not drafter.expects([1, 2, 3, 9, 7, 4, 5, 6, 8, 9, 4, 5])


def test_a_draft_that_ends_a_free_part_continues_with_the_forced_tokens_behind_it():
    drafter = ForcedDrafter(NgramDrafter())
    drafter.expect(6, {7: [4, 5]})
    assert drafter.draft([1, 2, 3, 7, 8, 1, 2], 4) == [3, 7, 4, 5]
    assert drafter.run == 2
