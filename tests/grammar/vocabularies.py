"""Made-up vocabularies of three kinds, and random walks through masks."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from infd.grammar.protocol import Vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from infd.grammar.protocol import Compiler, Matcher

LETTERS = b'abcdefghijklmnopqrstuvwxyz0123456789 \n{}[]",:.-+\\/_ABCDE'


def byte_level(seed: int, tokens: int = 600, *, gaps: int = 0) -> Vocabulary:
    """Return every byte, random pieces, two end ids and a special token, in random order; some pieces twice.

    gaps  ids without a token
    """
    draw = random.Random(seed)
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [bytes(draw.choices(LETTERS, k=draw.randint(2, 6))) for _ in range(tokens)]
    pieces += ["é".encode(), "€".encode()[:2], "😀".encode(), b"\xff\xfe", pieces[300]] + [b""] * gaps
    return _shuffled(draw, pieces)


def sentencepiece(seed: int, tokens: int = 600) -> Vocabulary:
    """Return 256 bytes, and pieces that may begin with a space; the decoder drops the answer's first space."""
    draw = random.Random(seed)
    pieces = [bytes([byte]) for byte in range(256)] + [b" ", b"  ", b" {", b"{", b'"']
    for _ in range(tokens):
        piece = bytes(draw.choices(LETTERS.replace(b" ", b"").replace(b"\n", b""), k=draw.randint(1, 5)))
        pieces.append(b" " + piece if draw.random() < 0.5 else piece)
    return _shuffled(draw, pieces, drop_space=True)


def large(seed: int = 0, tokens: int = 150_000) -> Vocabulary:
    """Return a byte-level vocabulary of the size of a real one."""
    return byte_level(seed, tokens)


def _shuffled(draw: random.Random, pieces: list[bytes], *, drop_space: bool = False) -> Vocabulary:
    tagged = [(piece, "") for piece in pieces] + [(b"<end>", "end"), (b"<turn>", "end"), (b"<think>", "special")]
    draw.shuffle(tagged)
    tokens = [piece for piece, _ in tagged]
    return Vocabulary(
        tokens=tokens,
        special=frozenset(index for index, (_, tag) in enumerate(tagged) if tag),
        end_ids=frozenset(index for index, (_, tag) in enumerate(tagged) if tag == "end"),
        columns=len(tokens) + draw.randint(0, 70),
        encode=lambda text: [],
        drop_space=drop_space,
    )


def allowed(compiler: Compiler, matcher: Matcher) -> list[int]:
    """Return the tokens that the matcher's mask allows."""
    return _allowed(compiler, matcher).tolist()


def _allowed(compiler: Compiler, matcher: Matcher) -> NDArray[np.int64]:
    """Return the tokens of a mask as an array: a list of 150,000 takes milliseconds to make."""
    return np.flatnonzero(np.unpackbits(mask(compiler, matcher).view(np.uint8), bitorder="little"))


def mask(compiler: Compiler, matcher: Matcher) -> NDArray[np.int32]:
    """Return the matcher's mask, a bit for each token."""
    row = np.full((1, compiler.vocabulary.words), 0x55555555, dtype=np.int32)
    (failure,) = compiler.fill([matcher], row)
    if failure is not None:
        raise failure
    return row[0]


def walk(compiler: Compiler, matcher: Matcher, draw: random.Random, tokens: int, ends: float = 0.3) -> list[int]:
    """Append random allowed tokens until an end id is drawn, which happens with a chance of `ends` where it is allowed.

    Returns the tokens, at most `tokens`, with the end id.
    """
    end_ids = compiler.vocabulary.end_ids
    ends_answer = np.zeros(32 * compiler.vocabulary.words, dtype=bool)
    ends_answer[list(end_ids)] = True
    walked: list[int] = []
    while len(walked) < tokens:
        choices = _allowed(compiler, matcher)
        assert len(choices), "a mask that allows nothing"
        is_end = ends_answer[choices]
        finishing, going = choices[is_end], choices[~is_end]
        pool = finishing if len(finishing) and (not len(going) or draw.random() < ends) else going
        token = int(draw.choice(pool))  # type: ignore[arg-type]
        matcher.advance([token])
        walked.append(token)
        if token in end_ids:
            break
    return walked


def text(vocabulary: Vocabulary, tokens: list[int]) -> str | None:
    """Return the text that tokens spell before their end id, None if they have none."""
    if not tokens or tokens[-1] not in vocabulary.end_ids:
        return None
    spelled = b"".join(vocabulary.tokens[token] for token in tokens[:-1]).decode()
    return spelled.removeprefix(" ") if vocabulary.drop_space else spelled


@lru_cache(maxsize=8)
def _by_first(vocabulary: Vocabulary) -> dict[int, list[int]]:
    """Return the tokens by the first byte of their text."""
    by_first: dict[int, list[int]] = {}
    for token, piece in enumerate(vocabulary.tokens):
        if piece and token not in vocabulary.special:
            by_first.setdefault(piece[0], []).append(token)
    return by_first


def split(vocabulary: Vocabulary, content: bytes, draw: random.Random) -> list[int]:
    """Return tokens that spell bytes, at random; every byte must be a token."""
    by_first = _by_first(vocabulary)
    tokens, at = [], 0
    while at < len(content):
        fitting = [each for each in by_first[content[at]] if content.startswith(vocabulary.tokens[each], at)]
        token = draw.choice(fitting)
        tokens.append(token)
        at += len(vocabulary.tokens[token])
    return tokens
