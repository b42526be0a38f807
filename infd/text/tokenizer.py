"""Text to ids and back, with the ids that transformers would give.

Reads tokenizer.json with the tokenizers library; what has no such file is
converted. Nothing changes after loading, so any thread may encode.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import tokenizers

from infd.errors import CheckpointError, InvalidRequest
from infd.text.bound import bound
from infd.text.checkpoint import NAMED_TOKENS, TextFiles
from infd.text.conversion import convert
from infd.text.pieces import BytePieces, TextPieces, recognise
from infd.untrusted import read

if TYPE_CHECKING:
    from collections.abc import Sequence

LARGEST_BYTES: Final = 2**28  # of tokenizer.json; vocabularies of a quarter million tokens take some 30 MiB
LARGEST_ID: Final = 2**24  # tables have a place for each id up to the largest; vocabularies end at some 2**18

# Some chat models end a turn with a token that their configuration does not call an end.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


class Tokenizer:
    """A checkpoint's vocabulary.

    vocab_size   one more than the largest id with a token; a model may have more rows
    special_ids  ids that `skip_special_tokens` leaves out
    end_ids      ids that end an answer: of generation_config.json, config.json, the tokenizer and the chat template
    """

    def __init__(self, backend: tokenizers.Tokenizer, files: TextFiles) -> None:
        """Take over `backend`: the special tokens of `files` are added to it, truncation and padding turned off.

        Raises CheckpointError for ids out of all proportion.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = files.split_special
        special = [*(files.special_tokens[role] for role in NAMED_TOKENS if role in files.special_tokens)]
        special += files.extra_special
        backend.add_tokens([tokenizers.AddedToken(**token) for _, token in sorted(files.added_tokens.items())])
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
        self._backend = backend
        self._files = files
        vocabulary = backend.get_vocab(with_added_tokens=False)  # a copy, which takes long to make
        added = backend.get_added_tokens_decoder()
        largest = max(chain(vocabulary.values(), added), default=-1)
        if largest > LARGEST_ID:
            raise CheckpointError(f"a token has the id {largest}; at most {LARGEST_ID} is accepted")
        self.vocab_size = 1 + largest
        self._pieces = recognise(backend, vocabulary)
        self._showing: tuple[frozenset[int], BytePieces | TextPieces] | None = None
        self._bound = bound(backend, self._pieces)
        self.special_ids = frozenset(
            token_id for token_id, token in added.items() if token.special or token.content in special
        )
        self.end_ids = self._find_end_ids()

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint. Raises CheckpointError, naming the file."""
        directory = Path(directory)
        files = TextFiles.read(directory)
        path = directory / "tokenizer.json"
        if path.exists():
            content = read(path, LARGEST_BYTES)
            try:
                backend = tokenizers.Tokenizer.from_buffer(content)
            except Exception as error:  # the library raises the bare class
                raise CheckpointError(f"{path}: {error}") from error
        else:
            backend = convert(directory)
        try:
            return cls(backend, files)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @property
    def files(self) -> TextFiles:
        """What else the checkpoint says about text."""
        return self._files

    @property
    def bos(self) -> str | None:
        return self._files.special_tokens.get("bos_token")

    @property
    def eos(self) -> str | None:
        return self._files.special_tokens.get("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        Takes most of a millisecond per kilobyte, and lets other threads run: encode long texts through `offload`.
        Raises InvalidRequest for a text that is not Unicode (a lone surrogate).
        """
        try:
            # Unlike `encode`, this one lets go of the interpreter's lock.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise InvalidRequest(f"the text is not valid Unicode{_where(text)}") from error

    def least_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, without reading it; 0 if nothing is known."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; those without a token add nothing."""
        # Unlike `decode`, this one lets go of the interpreter's lock.
        return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def id_of(self, token: str) -> int | None:
        """Return the id of a token written out, None if there is no such token."""
        return self._backend.token_to_id(token)

    def has(self, token_id: int) -> bool:
        """Say whether the id has a token."""
        return self._backend.id_to_token(token_id) is not None

    def piece(self, token_id: int) -> bytes:
        """Return what the id adds to a text that it does not begin; special tokens are written out.

        The bytes may be part of a character only.
        """
        if self._pieces is not None:
            return self._pieces.bytes_of(token_id)
        once, twice = (self.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
        return (twice.removeprefix(once) if twice.startswith(once) else once).encode()

    def pieces(
        self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()
    ) -> BytePieces | TextPieces | None:
        """Return the table to decode with, None where this decoder has no table.

        shown  special ids that are not skipped with the others; one set of them is remembered, the model's marks
        """
        if not skip_special_tokens or self._pieces is None:
            return self._pieces
        if not shown:
            return self._pieces_without_special
        if self._showing is None or self._showing[0] != shown:
            self._showing = shown, self._pieces.without(self.special_ids - shown)
        return self._showing[1]

    @cached_property
    def _pieces_without_special(self) -> BytePieces | TextPieces | None:
        return None if self._pieces is None else self._pieces.without(self.special_ids)

    def _find_end_ids(self) -> frozenset[int]:
        template = self._files.templates.get("default", "")
        names = [token for token in _TURN_ENDS if token in template]
        if self.eos is not None:
            names.append(self.eos)
        ids = (self.id_of(name) for name in names)
        return self._files.end_ids | frozenset(token_id for token_id in ids if token_id is not None)


def _where(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f" at character {error.start}"
    return ""
