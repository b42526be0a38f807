from __future__ import annotations

import re

import pytest

from infd.loadgen.datasets.call import Block, Outline
from infd.loadgen.prompts import IdWriter, TextWriter, WordCost, body_of

SHARED = Block("shared", 40)


def outlines(*tokens: int) -> list[Outline]:
    return [Outline((SHARED, Block(f"own {number}", count - 40))) for number, count in enumerate(tokens)]


# Counts of tokens that a chat's template of 7 tokens adds to.
TOKENIZERS = {
    "words": lambda text: 7 + len(text.split()),
    "bytes": lambda text: 7 + len(text),
    "pieces": lambda text: 7 + len(re.findall(r" ?\w{1,3}", text)),
    "letters and words": lambda text: 7 + sum(1 + ("e" in word) for word in text.split()),
}


@pytest.mark.parametrize("name", TOKENIZERS)
async def test_texts_are_fitted_to_the_servers_count(name: str) -> None:
    counted = TOKENIZERS[name]

    async def count(text: str) -> int:
        return counted(text)

    cost = WordCost.from_probes((counted("word " * 32), counted("word " * 96)))
    writer = TextWriter(cost, count)
    texts = [await writer.write(outline, 0) for outline in outlines(60, 61, 77, 200)]

    assert [counted(text) for text in texts] == [60, 61, 77, 200]
    assert writer.lengths.inexact == 0
    assert len({text[:20] for text in texts}) == 1


async def test_a_prompt_shorter_than_the_template_is_counted_as_inexact() -> None:
    async def count(text: str) -> int:
        return 7 + len(text)

    writer = TextWriter(WordCost(7.0, 5.0), count)
    text = await writer.write(Outline((Block("own", 3),)), 0)

    assert len(text) == 1
    assert writer.lengths.inexact == 1


async def test_the_templates_tokens_count_once() -> None:
    writer = TextWriter(WordCost(7.0, 1.0), None)

    assert len((await writer.write(outlines(60)[0], 0)).split()) == 60 - 7


async def test_ids_are_of_the_pool_and_equal_blocks_give_equal_ids() -> None:
    writer = IdWriter([5, 6, 7, 7, 9])
    first, second = [await writer.write(outline, 3) for outline in outlines(60, 60)]

    assert (len(first), len(second)) == (60, 60)
    assert set(first) | set(second) == {5, 6, 7, 9}
    assert first[:40] == second[:40]
    assert first[40:] != second[40:]
    assert first != await writer.write(outlines(60)[0], 4)


def test_messages_become_a_text_for_completions() -> None:
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]

    assert body_of(turns, chat=True) == {"messages": turns}
    assert body_of(turns, chat=False) == {"prompt": "a\nb"}
    assert body_of([1, 2], chat=False) == {"prompt": [1, 2]}
    assert body_of("x", chat=True) == {"messages": [{"role": "user", "content": "x"}]}
