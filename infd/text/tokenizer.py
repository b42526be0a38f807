"""Encode and decode text, with ids equal to those of transformers.

Reads tokenizer.json with the tokenizers library; `tekken.py` and `conversion.py` convert
other files to tokenizer.json. A tokenizer that `vetting` objects to runs in a worker
process. A loaded tokenizer never changes, so any thread may encode.
"""

from __future__ import annotations

import logging
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import tokenizers

from infd.errors import CheckpointError, InvalidRequest, TextFailed
from infd.gguf import is_gguf
from infd.gguf import text as gguf
from infd.text import bpe, cutting, detokenize, tekken, vetting
from infd.text.apart import ApartTokenizer, Vocabulary, convert
from infd.text.bound import bound
from infd.text.checkpoint import TextFiles
from infd.text.cutting import WHOLE
from infd.text.pieces import BytePieces, TextPieces, recognise
from infd.untrusted import read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.apart.client import Worker
    from infd.text.breakers import BreakerIndex
    from infd.text.checkpoint import Additions
    from infd.text.cutting import Cut, Encoded, Passage

LARGEST_BYTES: Final = 2**28  # maximum size of tokenizer.json; a vocabulary of 250,000 tokens takes about 30 MiB
LARGEST_ID: Final = 2**24  # bounds tables with an entry for each id; vocabularies end at about 2**18

# Tokens that end a turn; the configuration of some chat models does not list them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_LOG: Final = logging.getLogger("infd.text")


class Backend(Protocol):
    """The part of a tokenizer that encodes and decodes, in this process or in the worker."""

    @property
    def vocabulary(self) -> Vocabulary: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def encode_passages(self, passages: Sequence[Passage], cut: Cut, *, add_special_tokens: bool) -> list[Encoded]: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...
    def id_of(self, token: str) -> int | None: ...
    def token(self, token_id: int) -> str | None: ...


class Library:
    """A tokenizer of the tokenizers library, in this process."""

    def __init__(
        self, backend: tokenizers.Tokenizer, additions: Additions, vocabulary: Mapping[str, int] | None = None
    ) -> None:
        """Configure `backend`: apply the checkpoint's additions, disable truncation and padding.

        vocabulary  ids by token, without added tokens; None: copied from `backend`, which is slow

        Raises CheckpointError for ids above LARGEST_ID.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = additions.split_special
        backend.add_tokens([tokenizers.AddedToken(**token) for token in additions.tokens])
        special = additions.special
        backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
        self._backend = backend
        by_token = backend.get_vocab(with_added_tokens=False) if vocabulary is None else vocabulary
        added = backend.get_added_tokens_decoder()
        largest = max(chain(by_token.values(), added), default=-1)
        if largest > LARGEST_ID:
            raise CheckpointError(f"a token has the id {largest}; at most {LARGEST_ID} is accepted")
        pieces = recognise(backend, by_token)
        self.vocabulary = Vocabulary(
            vocab_size=1 + largest,
            pieces=pieces,
            bound=bound(backend, pieces),
            special_ids=frozenset(
                token_id for token_id, token in added.items() if token.special or token.content in special
            ),
            whole_ids=frozenset(
                token_id for token_id, token in added.items() if not (additions.split_special and token.special)
            ),
        )

    @classmethod
    def load(cls, content: bytes, additions: Additions) -> Library:
        """Load a tokenizer.json. Raises CheckpointError."""
        try:
            if (loaded := bpe.load(content)) is not None:
                return cls(loaded.tokenizer, additions, loaded.vocabulary)
            return cls(tokenizers.Tokenizer.from_buffer(content), additions)
        except CheckpointError:
            raise
        except BaseException as error:  # the library raises bare Exceptions; its panics derive from BaseException
            if isinstance(error, Exception) or _is_panic(error):
                raise CheckpointError(str(error)) from error
            raise

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            # Unlike `encode`, `encode_batch_fast` releases the GIL.
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise InvalidRequest(f"the text is not valid Unicode{_where(text)}") from error
        except BaseException as error:
            if isinstance(error, Exception) or _is_panic(error):
                raise TextFailed(f"the tokenizers library failed: {error}") from error
            raise

    def encode_passages(self, passages: Sequence[Passage], cut: Cut, *, add_special_tokens: bool) -> list[Encoded]:
        try:
            return cutting.encode(self._backend, passages, cut, add_special_tokens=add_special_tokens)
        except TypeError as error:
            where = next(filter(None, (_where(text) for passage in passages for text in passage.texts)), "")
            raise InvalidRequest(f"a text is not valid Unicode{where}") from error
        except BaseException as error:
            if isinstance(error, Exception) or _is_panic(error):
                raise TextFailed(f"the tokenizers library failed: {error}") from error
            raise

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        try:
            # Unlike `decode`, `decode_batch` releases the GIL.
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except BaseException as error:
            if isinstance(error, Exception) or _is_panic(error):
                raise TextFailed(f"the tokenizers library failed: {error}") from error
            raise

    def id_of(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def objection(self) -> str | None:
        """Return the first added token that makes the library panic on some texts, with the reason, or None.

        Either normalization empties the token, so that the token matches within characters, or another token strips
        white space at the token's edge, so that two matches overlap.
        """
        normalizer = self._backend.normalizer
        added = list(self._backend.get_added_tokens_decoder().values())
        strips = any(token.lstrip or token.rstrip for token in added)
        for token in added:
            found = token.content
            if token.normalized and normalizer is not None:
                found = normalizer.normalize_str(found)
            if not found:
                return f"the added token {token.content!r}, which normalization empties"
            if strips and found.strip() != found:
                return f"the added token {token.content!r}, whose white space another token strips"
        return None

    def tokens(self) -> list[str | None]:
        """Return all tokens, by id."""
        return [self._backend.id_to_token(token_id) for token_id in range(self.vocabulary.vocab_size)]


class Tokenizer:
    """A checkpoint's vocabulary.

    vocab_size   one more than the largest id with a token; the model's embedding may have more rows
    special_ids  ids that `skip_special_tokens` skips
    whole_ids    ids of added tokens: encoding a text that contains such a token never spells it with other tokens
    end_ids      ids that end an answer, from generation_config.json, config.json, the tokenizer and the chat template
    apart        whether encoding waits for the worker process, so that the event loop's thread must not encode
    """

    def __init__(self, backend: Backend | tokenizers.Tokenizer, files: TextFiles) -> None:
        """Combine a backend with the checkpoint's small files. Raises CheckpointError for ids above LARGEST_ID."""
        if isinstance(backend, tokenizers.Tokenizer):
            backend = Library(backend, files.additions)
        self._backend: Backend = backend
        self.apart = isinstance(backend, ApartTokenizer)
        self._files = files
        vocabulary = backend.vocabulary
        self.vocab_size = vocabulary.vocab_size
        self.special_ids = vocabulary.special_ids
        self.whole_ids = vocabulary.whole_ids
        self._pieces = vocabulary.pieces
        self._bound = vocabulary.bound
        self._pieces_with_marks: tuple[frozenset[int], BytePieces | TextPieces] | None = None
        self.end_ids = self._find_end_ids()

    @classmethod
    def load(cls, directory: str | Path, worker: Worker | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint, from its directory or GGUF file. Raises CheckpointError, naming the file.

        worker  runs conversions by transformers, and tokenizers that `vetting` objects to; None: this process runs them
        """
        directory = Path(directory)
        files = TextFiles.read(directory)
        path = directory / "tokenizer.json"
        if is_gguf(directory):
            path = directory
            content = gguf.read_tokenizer(path)
        elif path.exists():
            content = read(path, LARGEST_BYTES)
        elif (directory / tekken.FILE).exists():
            content = tekken.convert(directory)
        else:
            content = convert(directory, worker)
        try:
            return cls(_backend(content, files.additions, worker), files)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error

    @property
    def files(self) -> TextFiles:
        """The small text files of the checkpoint."""
        return self._files

    @property
    def bos(self) -> str | None:
        return self._files.special_tokens.get("bos_token")

    @property
    def eos(self) -> str | None:
        return self._files.special_tokens.get("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`.

        Encoding takes almost 1 ms per kilobyte and releases the GIL, so long texts should be encoded in another thread.
        Raises InvalidRequest for a text that is not Unicode (a lone surrogate), TooCostly at the worker's time limit,
        TextFailed if the library or the worker fails.
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_passages(
        self, passages: Sequence[Passage], cut: Cut = WHOLE, *, add_special_tokens: bool = True
    ) -> list[Encoded]:
        """Return the ids of texts, and of pairs of texts joined as the checkpoint's tokenizer joins pairs.

        cut  how much of each passage is kept

        As slow as `encode` for each text, and raises what `encode` raises.
        """
        return self._backend.encode_passages(passages, cut, add_special_tokens=add_special_tokens)

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, without encoding; 0 if no bound is known."""
        return 0 if self._bound is None else self._bound.least_tokens(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; ids without a token add nothing."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, None if the vocabulary lacks the token."""
        return self._backend.id_of(token)

    def ids_of(self, *roles: str) -> frozenset[int]:
        """Return the ids of the special tokens with these roles, such as "eos_token"."""
        named = (self._files.special_tokens.get(role) for role in roles)
        found = (self.id_of(token) for token in named if token)
        return frozenset(token_id for token_id in found if token_id is not None)

    def has(self, token_id: int) -> bool:
        """Return whether the vocabulary has a token with this id."""
        return self._backend.token(token_id) is not None

    def token(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, such as "Ġthe" or "<0x0A>"; None for an id without a token."""
        return self._backend.token(token_id)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that an id adds within a text; for the id of a special token, the token's text.

        The bytes may be part of a character.
        """
        if self._pieces is not None:
            return self._pieces.bytes_of(token_id)
        once, twice = (self.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
        return (twice.removeprefix(once) if twice.startswith(once) else once).encode()

    def spellings(self) -> list[bytes] | None:
        """Return the result of `piece` for each id; empty bytes for ids without a token.

        None if the decoder has no table, because an id's text may then depend on its neighbours.
        """
        if self._pieces is None:
            return None
        return [self._pieces.bytes_of(token_id) for token_id in range(self.vocab_size)]

    @cached_property
    def breakers(self) -> BreakerIndex:
        """The index of sequence breakers, made when first used. Raises Unsupported if `spellings` has none."""
        from infd.text.breakers import index_of

        return index_of(self.spellings(), partial(self.encode, add_special_tokens=False))

    @property
    def drops_space(self) -> bool:
        """Whether decoding removes a space at the start of an answer."""
        return isinstance(self._pieces, TextPieces) and (self._pieces.drop_space or self._pieces.first is not None)

    def drops_space_after(self, ids: Sequence[int], *, skip_special_tokens: bool) -> bool:
        """Return whether decoding removes a space at the start of the text that follows the text of `ids`."""
        if not self.drops_space:
            return False
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        detokenizer.feed(ids)
        detokenizer.flush()
        return detokenizer.drops_space

    def pieces(
        self, *, skip_special_tokens: bool, mark_ids: frozenset[int] = frozenset()
    ) -> BytePieces | TextPieces | None:
        """Return the table to decode with; None if this decoder has no table.

        mark_ids  special ids that are never skipped; only one set's table is cached, because a model has one set
        """
        if not skip_special_tokens or self._pieces is None:
            return self._pieces
        if not mark_ids:
            return self._pieces_without_special
        if self._pieces_with_marks is None or self._pieces_with_marks[0] != mark_ids:
            self._pieces_with_marks = mark_ids, self._pieces.without(self.special_ids - mark_ids)
        return self._pieces_with_marks[1]

    def detokenizer(
        self, *, skip_special_tokens: bool = True, mark_ids: frozenset[int] = frozenset()
    ) -> detokenize.Detokenizer:
        """Return a new detokenizer, for one stream: the fastest exact implementation for this tokenizer.

        mark_ids  special ids that are never skipped
        """
        pieces = self.pieces(skip_special_tokens=skip_special_tokens, mark_ids=mark_ids)
        if pieces is not None:
            return detokenize.with_table(pieces)
        hidden = self.special_ids - mark_ids if skip_special_tokens else frozenset()
        decode = partial(self.decode, skip_special_tokens=False)
        return detokenize.WindowText(decode, lambda token_id: token_id not in hidden and self.has(token_id))

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


def _backend(content: bytes, additions: Additions, worker: Worker | None) -> Backend:
    if worker is None:
        return Library.load(content, additions)
    vetted, objection = vetting.tokenizers.read(content)
    objection = objection or vetting.tokenizers.objection_to_added(additions)
    if objection is None:
        library = Library.load(vetted, additions)
        if (objection := library.objection()) is None:
            return library
    worker.reasons["tokenizer"] = objection
    _LOG.warning(
        "the model's tokenizer runs in a process of its own, which is slower: infd cannot bound its cost",
        extra={"reason": objection},
    )
    return ApartTokenizer(worker, content, additions)


def _is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of Rust code; its class derives directly from BaseException."""
    return type(error).__name__ == "PanicException"


def _where(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f" at character {error.start}"
    return ""
