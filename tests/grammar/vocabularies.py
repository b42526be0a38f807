"""Made-up vocabularies of three kinds, and random walks through masks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from infd.grammar.protocol import Vocabulary

if TYPE_CHECKING:
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
    row = np.full((1, compiler.vocabulary.words), 0x55555555, dtype=np.int32)
    (failure,) = compiler.fill([matcher], row)
    if failure is not None:
        raise failure
    return np.flatnonzero(np.unpackbits(row[0].view(np.uint8), bitorder="little")).tolist()


def walk(compiler: Compiler, matcher: Matcher, draw: random.Random, tokens: int, ends: float = 0.3) -> list[int]:
    """Append random allowed tokens until an end id is drawn, which happens with a chance of `ends` where it is allowed.

    Returns the tokens, at most `tokens`, with the end id.
    """
    end_ids = compiler.vocabulary.end_ids
    walked: list[int] = []
    while len(walked) < tokens:
        choices = allowed(compiler, matcher)
        assert choices, "a mask that allows nothing"
        finishing = [each for each in choices if each in end_ids]
        going = [each for each in choices if each not in end_ids]
        pool = finishing if finishing and (not going or draw.random() < ends) else going
        token = draw.choice(pool)
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


def split(vocabulary: Vocabulary, content: bytes, draw: random.Random) -> list[int]:
    """Return tokens that spell bytes, at random; every byte must be a token."""
    by_first: dict[int, list[int]] = {}
    for token, piece in enumerate(vocabulary.tokens):
        if piece and token not in vocabulary.special:
            by_first.setdefault(piece[0], []).append(token)
    tokens, at = [], 0
    while at < len(content):
        fitting = [each for each in by_first[content[at]] if content.startswith(vocabulary.tokens[each], at)]
        token = draw.choice(fitting)
        tokens.append(token)
        at += len(vocabulary.tokens[token])
    return tokens
