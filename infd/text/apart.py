"""A checkpoint's text that may not run in the daemon's process, as the daemon sees it.

Templates and tokenizers that `vetting` objects to, and files that transformers
must convert, are tasks for a worker: each ends within its limit, and what it
does to its process costs the request that asked for it. `worker.py` does them.
What streams of answers read, a table of every token, is data: it comes once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from infd.errors import CheckpointError, InvalidRequest, TextFailed, TooCostly
from infd.text.bound import Bound  # noqa: TC001 (msgspec reads annotations)
from infd.text.checkpoint import Additions  # noqa: TC001 (msgspec reads annotations)
from infd.text.detokenize import with_table
from infd.text.fuel import Limits  # noqa: TC001 (msgspec reads annotations)
from infd.text.pieces import BytePieces, TextPieces  # noqa: TC001 (msgspec reads annotations)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from infd.apart.client import Worker

MODULE: Final = "infd.text.worker"

# Seconds. A text of a mebibyte, the longest that is read, takes an ordinary tokenizer one.
ENCODE_S: Final = 10.0
COMPILE_S: Final = 5.0
LOAD_S: Final = 60.0
CONVERT_S: Final = 300.0  # transformers is imported, which takes seconds
MARGIN_S: Final = 1.0  # a rendering ends by itself at its own limit, mostly


class Load(Struct, tag=True):
    """Load a tokenizer.json; later tasks encode with it."""

    content: bytes
    additions: Additions


class Encode(Struct, tag=True):
    text: str
    add_special_tokens: bool


class Convert(Struct, tag=True):
    """Make a tokenizer.json of a checkpoint without one."""

    directory: str


class Compile(Struct, tag=True):
    """Compile a template, and find out about it."""

    source: str


class Render(Struct, tag=True):
    source: str
    variables: Any
    limits: Limits


Task = Load | Encode | Convert | Compile | Render


class Vocabulary(Struct, frozen=True):
    """What there is to know of a tokenizer without encoding.

    vocab_size   one more than the largest id with a token
    special_ids  ids that `skip_special_tokens` leaves out
    """

    vocab_size: int
    pieces: BytePieces | TextPieces | None
    bound: Bound | None
    special_ids: frozenset[int]


class Loaded(Struct, frozen=True):
    """A tokenizer's vocabulary, and its tokens by id."""

    vocabulary: Vocabulary
    tokens: list[str | None]


class Findings(Struct, frozen=True):
    """What a compiled template reads: variables of these names; and whether content may be a list of parts."""

    reads: frozenset[str]
    reads_parts: bool


class ApartTokenizer:
    """See `tokenizer.Backend`. Only threads may encode."""

    def __init__(self, worker: Worker, content: bytes, additions: Additions) -> None:
        """Raises CheckpointError."""
        self._worker = worker
        try:
            loaded = worker.keep(Load(content, additions), Loaded, seconds=LOAD_S)
        except TooCostly as error:
            raise CheckpointError(f"the tokenizer {error} to load") from error
        except TextFailed as error:
            raise CheckpointError(f"the tokenizer cannot be loaded: {error}") from error
        self.vocabulary, self._tokens = loaded.vocabulary, loaded.tokens
        pieces = self.vocabulary.pieces
        if pieces is None:
            raise CheckpointError("infd has no table for its decoder, and so cannot stream its text safely")
        self._pieces = pieces
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens) if token is not None}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return self._worker.ask(Encode(text, add_special_tokens), list[int], seconds=ENCODE_S)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode at character {error.start}") from error
        except TooCostly as error:
            raise TooCostly(f"the model's tokenizer {error} over this text") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        hidden = self.vocabulary.special_ids if skip_special_tokens else frozenset()
        text = with_table(self._pieces.without(hidden) if hidden else self._pieces)
        return text.feed(ids) + text.flush()

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def has(self, token_id: int) -> bool:
        return 0 <= token_id < len(self._tokens) and self._tokens[token_id] is not None


class ApartTemplate:
    """See `chat.Compiled`. Only threads may render."""

    def __init__(self, worker: Worker, source: str) -> None:
        """Raises InvalidRequest for a source that is wrong."""
        self._worker = worker
        self._source = source
        try:
            found = worker.ask(Compile(source), Findings, seconds=COMPILE_S)
        except TooCostly as error:
            raise TooCostly(f"the chat template {error} to compile", param="messages") from error
        self.reads = found.reads
        self.reads_parts = found.reads_parts

    def render(self, variables: Mapping[str, Any], limits: Limits) -> str:
        try:
            return self._worker.ask(Render(self._source, variables, limits), str, seconds=limits.seconds + MARGIN_S)
        except TooCostly as error:
            if error.param is not None:
                raise
            raise TooCostly(f"chat template: {error}", param="messages") from error
        except (msgspec.ValidationError, UnicodeEncodeError, OverflowError) as error:
            raise InvalidRequest(f"the conversation cannot be rendered: {error}", param="messages") from error


def convert(directory: Path, worker: Worker | None) -> bytes:
    """Return a tokenizer.json made of a checkpoint's other files. Raises CheckpointError."""
    if worker is None:
        from infd.text import conversion

        return conversion.convert(directory)
    try:
        return worker.ask(Convert(str(directory)), bytes, seconds=CONVERT_S)
    except (TooCostly, TextFailed) as error:
        raise CheckpointError(f"{directory}: its tokenizer cannot be converted: {error}") from error
