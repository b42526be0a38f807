"""Generate arithmetic conversations: many phrasings, one form of answer.

Range: addition and subtraction of 0 to 99 (results may be negative), the
multiplication tables to 12 and their divisions, comparison of two numbers to 99,
predecessor and successor, doubling to 50, halving to 100, and word problems of
one operation.

About one pair of numbers in ten is held out of training. Sums are held out in both
orders; products in one order only, because the model memorizes the multiplication
tables and must see every entry.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.embedded.recipe.conversation import Conversation, Expect, Pool, pick
from infd.embedded.recipe.slots import belongs, listed, name, opening, read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

PHRASES: Final[Mapping[str, Any]] = read("arithmetic")
HELD_OUT_PAIRS: Final = 10  # one pair in ten is held out
THINKING_SHARE: Final = 0.35
BARE_SHARE: Final = 0.15
LARGER: Final = ("larger", "bigger", "greater", "higher")
SMALLER: Final = ("smaller", "lower", "lesser", "less")


class Problem(Struct, frozen=True):
    """A question with its reasoning and answer.

    answer   full sentence or equation
    result   required part of the answer, and the complete answer if the question requests the result only
    """

    question: str
    thought: str
    answer: str
    result: str


def draw(rng: Random, pool: Pool) -> Conversation:
    """Draw a conversation with one problem, sometimes after an earlier problem."""
    messages = opening(rng, pool)
    if rng.random() < 0.12:
        earlier = _problem(rng, pool)
        messages += [
            {"role": "user", "content": earlier.question},
            {"role": "assistant", "content": earlier.answer},
        ]
    problem = _problem(rng, pool)
    thinking = rng.random() < THINKING_SHARE
    bare = problem.question[-1] in ".?" and problem.result.lstrip("-").isdigit() and rng.random() < BARE_SHARE
    question = problem.question
    if question[-1] in ".?":
        question += f" {pick(rng, PHRASES['bare'], pool)}" if bare else rng.choice(PHRASES["thanks"])
    answer: dict[str, Any] = {"role": "assistant", "content": problem.result if bare else problem.answer}
    # If the question contains the result, a wrong answer that repeats the question contains the result too. The whole
    # answer is then compared.
    said_already = problem.result in re.findall(r"\d+", question)
    if thinking:
        answer["reasoning_content"] = problem.thought
    return Conversation(
        kind="arithmetic",
        messages=[*messages, {"role": "user", "content": question}, answer],
        thinking=thinking,
        expect=Expect(text=answer["content"]) if bare or said_already else Expect(contains=[[problem.result]]),
    )


def exercise(rng: Random, pool: Pool) -> Problem:
    """Draw a problem whose answer is an equation."""
    return rng.choice((_add, _add, _subtract, _subtract, _multiply, _divide))(rng, pool)


def _problem(rng: Random, pool: Pool) -> Problem:
    (make,) = rng.choices([make for make, _ in _PROBLEMS], [weight for _, weight in _PROBLEMS])
    return make(rng, pool)


def sum_pair(rng: Random, pool: Pool, sign: str, most: int = 99) -> tuple[int, int]:
    """Draw two numbers to add, subtract or compare; both orders of a pair are in the same pool."""
    while True:
        # Users mostly ask about small numbers.
        top = rng.choice((10, 20, most, most, most))
        a, b = rng.randint(0, min(top, most)), rng.randint(0, min(top, most))
        if belongs(f"{min(a, b)} {sign} {max(a, b)}", pool, one_in=HELD_OUT_PAIRS):
            return a, b


def table_pair(rng: Random, pool: Pool, sign: str, least: int = 0) -> tuple[int, int]:
    """Draw two factors up to 12. Training contains held-out pairs in reverse order, so the table is complete."""
    while True:
        a, b = rng.randint(0, 12), rng.randint(least, 12)
        held = a < b and belongs(f"{a} {sign} {b}", Pool.HELD_OUT, one_in=HELD_OUT_PAIRS // 2)
        if held == (pool is Pool.HELD_OUT):
            return a, b


def one_number(rng: Random, pool: Pool, word: str, low: int, high: int) -> int:
    """Draw a number for a question about one number. `word` and the number together determine its pool."""
    while True:
        if belongs(f"{word} {(number := rng.randint(low, high))}", pool, one_in=HELD_OUT_PAIRS):
            return number


def adding(a: int, b: int) -> str:
    """Return the reasoning for a sum: ones, carry, tens."""
    ones = a % 10 + b % 10
    steps = [f"Ones: {a % 10} + {b % 10} = {ones}."]
    if max(a, b) >= 10:
        carry = f" + {ones // 10}" if ones >= 10 else ""
        steps.append(f"Tens: {a // 10} + {b // 10}{carry} = {(a + b) // 10}.")
    return " ".join([*steps, f"So {a} + {b} = {a + b}."])


def subtracting(a: int, b: int) -> str:
    """Return the reasoning for a difference: ones, borrow, tens. The smaller number is subtracted from the larger."""
    if a < b:
        return f"{a} is less than {b}, so the result is negative. {subtracting(b, a)} So {a} - {b} = {a - b}."
    borrow = a % 10 < b % 10
    ones = a % 10 + 10 * borrow
    steps = [f"Ones: {ones} - {b % 10} = {ones - b % 10}."]
    if a >= 10:
        taken = " - 1" if borrow else ""
        steps.append(f"Tens: {a // 10} - {b // 10}{taken} = {(a - b) // 10}.")
    return " ".join([*steps, f"So {a} - {b} = {a - b}."])


def multiplying(a: int, b: int) -> str:
    """Return the reasoning for a product. A first factor above 10, or of 6 to 9, is split into 10 or 5 and the rest."""
    split = 10 if a > 10 else 5 if 5 < a < 10 else 0
    if not split:
        return f"So {a} × {b} = {a * b}."
    rest = a - split
    return (
        f"{a} = {split} + {rest}. {split} × {b} = {split * b}. {rest} × {b} = {rest * b}. "
        f"{split * b} + {rest * b} = {a * b}. So {a} × {b} = {a * b}."
    )


def dividing(product: int, by: int) -> str:
    """Return the reasoning for a division: the product in the multiplication table that equals the dividend."""
    return f"{by} × {product // by} = {product}. So {product} ÷ {by} = {product // by}."


def comparing(a: int, b: int) -> str:
    """Return the reasoning for a comparison: tens first, then ones."""
    if a // 10 != b // 10:
        return f"Tens: {a // 10} and {b // 10}. So {max(a, b)} is larger than {min(a, b)}."
    if a != b:
        return f"Tens are the same. Ones: {a % 10} and {b % 10}. So {max(a, b)} is larger than {min(a, b)}."
    return f"Tens and ones are the same. So {a} and {b} are equal."


def _add(rng: Random, pool: Pool) -> Problem:
    a, b = sum_pair(rng, pool, "+")
    question = pick(rng, PHRASES["add"], pool).format(a=a, b=b)
    return Problem(question, adding(a, b), f"{a} + {b} = {a + b}.", str(a + b))


def _subtract(rng: Random, pool: Pool) -> Problem:
    a, b = sum_pair(rng, pool, "-")
    question = pick(rng, PHRASES["subtract"], pool).format(a=a, b=b)
    return Problem(question, subtracting(a, b), f"{a} - {b} = {a - b}.", str(a - b))


def _multiply(rng: Random, pool: Pool) -> Problem:
    a, b = table_pair(rng, pool, "×")
    question = pick(rng, PHRASES["multiply"], pool).format(a=a, b=b)
    return Problem(question, multiplying(a, b), f"{a} × {b} = {a * b}.", str(a * b))


def _divide(rng: Random, pool: Pool) -> Problem:
    quotient, by = table_pair(rng, pool, "÷", least=1)
    product = quotient * by
    question = pick(rng, PHRASES["divide"], pool).format(a=product, b=by)
    return Problem(question, dividing(product, by), f"{product} ÷ {by} = {quotient}.", str(quotient))


def _compare(rng: Random, pool: Pool) -> Problem:
    a, b = sum_pair(rng, pool, "?")
    signs = rng.choice((LARGER, SMALLER))
    question = pick(rng, PHRASES["compare"], pool).format(a=a, b=b, sign=rng.choice(signs[:3]))
    if a == b:
        return Problem(question, comparing(a, b), f"{a} and {b} are equal.", "equal")
    wanted, other = (max(a, b), min(a, b)) if signs is LARGER else (min(a, b), max(a, b))
    return Problem(question, comparing(a, b), f"{wanted} is {signs[0]} than {other}.", f"{wanted} is {signs[0]}")


def _judge(rng: Random, pool: Pool) -> Problem:
    a, b = sum_pair(rng, pool, "?")
    signs = rng.choice((LARGER, SMALLER))
    phrase = pick(rng, PHRASES["judge"], pool)
    choices = signs[:3] if " a {sign}" in phrase or signs is LARGER else ("smaller", "lower", "less")
    question = phrase.format(a=a, b=b, sign=rng.choice(choices))
    if a == b:
        return Problem(question, comparing(a, b), f"No, {a} and {b} are equal.", f"No, {a} and {b} are equal")
    relation = "larger" if a > b else "smaller"
    verdict = f"{'Yes' if relation == signs[0] else 'No'}, {a} is {relation} than {b}"
    return Problem(question, comparing(a, b), f"{verdict}.", verdict)


def _neighbour(rng: Random, pool: Pool) -> Problem:
    after, by = rng.choice((("after", 1), ("before", -1)))
    a = one_number(rng, pool, after, 1, 99)
    question = pick(rng, PHRASES["neighbour"], pool).format(a=a, after=after)
    sum_ = f"{a} {'+' if by > 0 else '-'} 1 = {a + by}"
    return Problem(question, f"{sum_}.", f"The number {after} {a} is {a + by}.", str(a + by))


def _double(rng: Random, pool: Pool) -> Problem:
    a = one_number(rng, pool, "double", 0, 50)
    question = pick(rng, PHRASES["double"], pool).format(a=a)
    return Problem(question, adding(a, a), f"Double {a} is {2 * a}.", str(2 * a))


def _halve(rng: Random, pool: Pool) -> Problem:
    a = one_number(rng, pool, "halve", 0, 50)
    question = pick(rng, PHRASES["halve"], pool).format(a=2 * a)
    return Problem(question, f"{a} + {a} = {2 * a}.", f"Half of {2 * a} is {a}.", str(a))


def _story(rng: Random, pool: Pool) -> Problem:
    about = rng.choice(("gain", "loss", "groups"))
    while True:
        a, b = table_pair(rng, pool, "×") if about == "groups" else sum_pair(rng, pool, "+" if about == "gain" else "-")
        if about == "loss":
            a, b = max(a, b), min(a, b)
        if min(a, b) > 1 and (about != "loss" or a - b > 1):  # avoids "1 apples"
            break
    sign, result, thought = {
        "gain": ("+", a + b, adding(a, b)),
        "loss": ("-", a - b, subtracting(max(a, b), min(a, b))),
        "groups": ("×", a * b, multiplying(a, b)),
    }[about]
    who, other = name(rng, pool, "people"), name(rng, pool, "people")
    blanks = {"a": a, "b": b, "c": result, "who": who, "other": other, "things": listed(rng, "things", pool)}
    question, closing = (text.format(**blanks) for text in pick(rng, PHRASES[about], pool))
    return Problem(question, thought, f"{a} {sign} {b} = {result}. {closing}", str(result))


_PROBLEMS: Final[tuple[tuple[Callable[[Random, Pool], Problem], float], ...]] = (
    (_add, 5),
    (_subtract, 5),
    (_multiply, 3),
    (_divide, 2.5),
    (_compare, 1.5),
    (_judge, 1),
    (_neighbour, 1),
    (_double, 1),
    (_halve, 1),
    (_story, 4),
)
