"""Passages are cut as the tokenizers library cuts them when truncation is enabled."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from infd.text import apart
from infd.text.checkpoint import Additions
from infd.text.cutting import Cut, Encoded, Passage
from infd.text.tokenizer import Library
from infd.text.worker import Tasks

WORDS = ["[CLS]", "[SEP]", *"abcdefgh"]
BERT = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
)
ROBERTA = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
)
NONE = Additions((), ("[CLS]", "[SEP]"), split_special=False)


def backend(post: processors.TemplateProcessing = BERT) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = post
    return made


@pytest.mark.parametrize("post", [BERT, ROBERTA])
def test_cut_passages_are_those_of_the_library(post: processors.TemplateProcessing):
    library, reference, draw = Library(backend(post), NONE), backend(post), random.Random(1)
    for _ in range(400):
        texts = tuple(" ".join(draw.choices(WORDS[2:], k=draw.randrange(12))) for _ in range(draw.choice([1, 2])))
        most, side, special = draw.randrange(4, 20), draw.choice(["left", "right"]), draw.random() < 0.7
        reference.enable_truncation(most, direction=side)
        expected = reference.encode(*texts, add_special_tokens=special)
        (found,) = library.encode_passages([Passage(texts)], Cut(most, side=side), add_special_tokens=special)

        assert found.ids == expected.ids, (texts, most, side, special)
        assert found.second == (expected.type_ids.index(1) if 1 in expected.type_ids else None)


def test_each_text_of_a_pair_can_be_cut_alone():
    library = Library(backend(), NONE)
    passages = [Passage(("a b c d", "e f g h"), (2, 3)), Passage(("a", "e f g h"), (None, 3))]

    found = library.encode_passages(passages, Cut(), add_special_tokens=True)

    assert [each.ids for each in found] == [[0, 2, 3, 1, 6, 7, 8, 1], [0, 2, 1, 6, 7, 8, 1]]
    assert [each.second for each in found] == [4, 3]


def test_a_cut_that_leaves_no_room_keeps_the_special_tokens():
    (found,) = Library(backend(), NONE).encode_passages([Passage(("a b", "c"))], Cut(1), add_special_tokens=True)

    assert found.ids == [0, 1, 1]


def test_the_worker_process_encodes_passages_too():
    tokenizer = Tasks()
    tokenizer.do(apart.LoadTokenizer(backend().to_str().encode(), NONE))

    found = tokenizer.do(apart.EncodePassages([Passage(("a", "b")), Passage(("c",))], Cut(4), add_special_tokens=True))

    assert found == [Encoded([0, 1, 3, 1], 2), Encoded([0, 4, 1])]
