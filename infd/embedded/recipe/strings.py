"""Generate tasks on words: repeat, list, count, spell.

The model reads tokens, not letters. In tasks about letters, the answer or its
reasoning first spells the word: "c-a-t".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.embedded.recipe.conversation import Conversation, Expect, Pool, pick
from infd.embedded.recipe.slots import fill, listed, made_up, opening, read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

PHRASES: Final[Mapping[str, list[str]]] = read("strings")
THINKING_SHARE: Final = 0.3
ONE_WORD_SHARE: Final = 0.2
LONGEST: Final = 10  # maximum letters of a word in most tasks
LONGEST_REVERSED: Final = 6
ORDINALS: Final = ("first", "second", "third", "fourth", "fifth")
LETTERS: Final = "abcdefghijklmnoprstuvwy"


class Task(Struct, frozen=True):
    """A question with its answer.

    word  the answer as one word; None if the answer needs several words
    """

    question: str
    thought: str
    answer: str
    expect: Expect
    word: str | None = None


def draw(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation with one task."""
    (make,) = rng.choices([make for make, _ in _TASKS], [weight for _, weight in _TASKS])
    task = make(rng, pool)
    question, answer, expect = task.question, task.answer, task.expect
    if task.word is not None and question[-1] in ".?" and rng.random() < ONE_WORD_SHARE:
        question = f"{question} {pick(rng, PHRASES['one_word'], pool)}"
        answer, expect = task.word, Expect(text=task.word)
    message: dict[str, Any] = {"role": "assistant", "content": answer}
    thinking = rng.random() < THINKING_SHARE
    if thinking:
        message["reasoning_content"] = task.thought
    return Conversation(
        kind="strings",
        messages=[*opening(rng, pool), {"role": "user", "content": question}, message],
        thinking=thinking,
        expect=expect,
    )


def spelled(word: str) -> str:
    return "-".join(word)


def _exactly(question: str, thought: str, answer: str) -> Task:
    return Task(question, thought, answer, Expect(text=answer))


def _text(rng: Random, pool: Pool) -> str:
    """Draw text to copy: random words and names, which the context does not predict."""
    chance = rng.random()
    if chance < 0.45:
        return str(fill(rng, rng.choice(("message", "title", "errand", "query", "full_name", "code", "url")), pool))
    kinds = ("word", "word", "word", "made_up", "person", "city", "code", "int:0:999", "food")
    return " ".join(str(fill(rng, rng.choice(kinds), pool)) for _ in range(rng.randint(1, 7)))


def _words(rng: Random, pool: Pool, low: int, high: int) -> list[str]:
    """Draw `low` to `high` distinct words."""
    count, found = rng.randint(low, high), dict[str, None]()
    while len(found) < count:
        found[_word(rng, pool, longest=12) if rng.random() < 0.85 else made_up(rng, pool)] = None
    return list(found)


def _word(rng: Random, pool: Pool, longest: int = LONGEST) -> str:
    """Draw a word of 3 to `longest` letters, sometimes made up, so that spelling cannot be memorized."""
    while True:
        word = made_up(rng, pool, syllables=rng.choice((1, 2, 2))) if rng.random() < 0.3 else listed(rng, "words", pool)
        if 3 <= len(word) <= longest:
            return word


def _items(rng: Random, pool: Pool, low: int = 2, high: int = 6) -> list[str]:
    kind = rng.choice(("word", "word", "food", "things", "person", "city", "product"))
    count, found = rng.randint(low, high), dict[str, None]()
    for _ in range(4 * count):  # bounded: a short list may contain fewer words
        if len(found) < count:
            found[fill(rng, kind, pool)] = None
    return list(found)


def _series(rng: Random, items: list[str]) -> str:
    """Join items with commas, sometimes with a final "and"."""
    return ", ".join(items) if len(items) < 2 or rng.random() < 0.7 else f"{', '.join(items[:-1])} and {items[-1]}"


def _repeat(rng: Random, pool: Pool) -> Task:
    text = _text(rng, pool)
    return _exactly(pick(rng, PHRASES["repeat"], pool).format(text=text), "I repeat the words as they are.", text)


def _times(rng: Random, pool: Pool) -> Task:
    word, n = _word(rng, pool), rng.randint(2, 6)
    question = pick(rng, PHRASES["times"], pool).format(word=word, n=n)
    return _exactly(question, f"I write {word} {n} times.", " ".join([word] * n))


def _quotes(rng: Random, pool: Pool) -> Task:
    text = _text(rng, pool)
    return _exactly(pick(rng, PHRASES["quotes"], pool).format(text=text), "I put quotes around the words.", f'"{text}"')


def _bullets(rng: Random, pool: Pool) -> Task:
    items = _items(rng, pool)
    question = pick(rng, PHRASES["bullets"], pool).format(items=_series(rng, items))
    return _exactly(question, f"There are {len(items)} items.", "\n".join(f"- {item}" for item in items))


def _numbered(rng: Random, pool: Pool) -> Task:
    items = _items(rng, pool)
    question = pick(rng, PHRASES["numbered"], pool).format(items=_series(rng, items))
    answer = "\n".join(f"{place}. {item}" for place, item in enumerate(items, 1))
    return _exactly(question, f"There are {len(items)} items.", answer)


def _commas(rng: Random, pool: Pool) -> Task:
    words = _words(rng, pool, 2, 6)
    question = pick(rng, PHRASES["commas"], pool).format(words=" ".join(words))
    return _exactly(question, f"There are {len(words)} words.", ", ".join(words))


def _numbering(items: list[str]) -> str:
    return ", ".join(f"{place} {item}" for place, item in enumerate(items, 1))


def _count(rng: Random, pool: Pool) -> Task:
    items = _items(rng, pool, 2, 8)
    question = pick(rng, PHRASES["count"], pool).format(items=_series(rng, items))
    answer = f"{_numbering(items)}. There are {len(items)} items."
    return Task(question, f"{_numbering(items)}.", answer, Expect(contains=[[f"There are {len(items)} items"]]))


def _nth(rng: Random, pool: Pool) -> Task:
    words = _words(rng, pool, 3, 6)
    place = rng.randrange(min(len(words), len(ORDINALS)))
    nth = ORDINALS[place]
    if rng.random() < 0.2:
        place, nth = len(words) - 1, "last"
    question = pick(rng, PHRASES["nth"], pool).format(words=" ".join(words), nth=nth)
    answer = f"The {nth} word is {words[place]}."
    return Task(question, f"{_numbering(words)}.", answer, Expect(text=answer), words[place])


def _upper(rng: Random, pool: Pool) -> Task:
    word = _word(rng, pool)
    return _exactly(pick(rng, PHRASES["upper"], pool).format(word=word), f"{spelled(word)}.", word.upper())


def _lower(rng: Random, pool: Pool) -> Task:
    word = _word(rng, pool)
    shout = rng.choice((word.upper(), word.capitalize()))
    return _exactly(pick(rng, PHRASES["lower"], pool).format(word=shout), f"{spelled(shout)}.", word)


def _spell(rng: Random, pool: Pool) -> Task:
    word = _word(rng, pool)
    return _exactly(pick(rng, PHRASES["spell"], pool).format(word=word), f"The word is {word}.", spelled(word))


def _end(rng: Random, pool: Pool) -> Task:
    word = _word(rng, pool)
    which, letter = rng.choice((("first", word[0]), ("last", word[-1])))
    question = pick(rng, PHRASES[which], pool).format(word=word)
    answer = f"The {which} letter of {word} is {letter}."
    return Task(question, f"{spelled(word)}.", answer, Expect(text=answer))


def _length(rng: Random, pool: Pool) -> Task:
    word = _word(rng, pool)
    counted = ", ".join(f"{place} {letter}" for place, letter in enumerate(word, 1))
    answer = f"{spelled(word)} has {len(word)} letters."
    question = pick(rng, PHRASES["length"], pool).format(word=word)
    return Task(question, f"{counted}.", answer, Expect(contains=[[f"{len(word)} letters"]]))


def _reverse(rng: Random, pool: Pool) -> Task:
    word = _word(rng, pool, longest=LONGEST_REVERSED)
    back = word[::-1]
    question = pick(rng, PHRASES["reverse"], pool).format(word=word)
    answer = f"{spelled(word)} backwards is {spelled(back)}: {back}"
    return Task(question, f"{spelled(word)} backwards is {spelled(back)}.", answer, Expect(contains=[[back]]))


def _holds(rng: Random, pool: Pool) -> Task:
    word = _word(rng, pool)
    letter = rng.choice(word) if rng.random() < 0.5 else rng.choice(LETTERS)
    question = pick(rng, PHRASES["holds"], pool).format(word=word, letter=letter)
    verdict, claim = ("Yes", "contains") if letter in word else ("No", "does not contain")
    answer = f"{verdict}, {spelled(word)} {claim} {letter}."
    return Task(question, f"{spelled(word)}.", answer, Expect(contains=[[verdict]]), verdict)


def _sort(rng: Random, pool: Pool) -> Task:
    while True:
        words = _words(rng, pool, 3, 3)
        if len({word[0] for word in words}) == len(words):
            break
    question = pick(rng, PHRASES["sort"], pool).format(items=", ".join(words))
    first = ", ".join(f"{word[0]} {word}" for word in words)
    return _exactly(question, f"First letters: {first}.", ", ".join(sorted(words)))


_TASKS: Final[tuple[tuple[Callable[[Random, Pool], Task], float], ...]] = (
    (_repeat, 6),
    (_quotes, 2),
    (_times, 2),
    (_bullets, 2),
    (_numbered, 2),
    (_commas, 2),
    (_count, 2),
    (_nth, 2),
    (_upper, 1.5),
    (_lower, 1.5),
    (_spell, 3),
    (_end, 2),
    (_length, 2),
    (_reverse, 1.5),
    (_holds, 1.5),
    (_sort, 1.5),
)
