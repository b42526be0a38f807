"""Run templates and tokenizers in a worker process: the daemon's side; `worker.py` is the worker's side.

The daemon sends a task for each use of a template or tokenizer that `vetting`
objects to, and for files that transformers must convert. A task fails at its time
limit; a crash of the worker fails only the request that sent the task. The worker
sends the table from token ids to text once; the daemon's detokenizers read this table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from infd.errors import CheckpointError, InvalidRequest, TextFailed, TooCostly
from infd.text.bound import Bound  # noqa: TC001 (msgspec reads annotations)
from infd.text.checkpoint import Additions  # noqa: TC001 (msgspec reads annotations)
from infd.text.cutting import Cut, Encoded, Passage
from infd.text.detokenize import with_table
from infd.text.fuel import Limits  # noqa: TC001 (msgspec reads annotations)
from infd.text.pieces import BytePieces, TextPieces  # noqa: TC001 (msgspec reads annotations)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from infd.apart.client import Worker

T = TypeVar("T")

MODULE: Final = "infd.text.worker"

# Time limits of tasks, in seconds. An ordinary tokenizer encodes 1 MiB of text in 1 s.
ENCODE_S: Final = 10.0
COMPILE_S: Final = 5.0
LOAD_S: Final = 60.0
CONVERT_S: Final = 300.0  # includes the import of transformers, which takes seconds
MARGIN_S: Final = 1.0  # added to Limits.seconds, after which the worker itself normally stops a rendering


class LoadTokenizer(Struct, tag=True):
    """The task to load a tokenizer.json; later `Encode` tasks use the loaded tokenizer."""

    content: bytes
    additions: Additions


class Encode(Struct, tag=True):
    text: str
    add_special_tokens: bool


class EncodePassages(Struct, tag=True):
    passages: list[Passage]
    cut: Cut
    add_special_tokens: bool


class ConvertTokenizer(Struct, tag=True):
    """The task to convert a checkpoint's vocabulary files to a tokenizer.json."""

    directory: str


class CompileTemplate(Struct, tag=True):
    """The task to compile a template; the reply is TemplateProperties."""

    source: str


class RenderTemplate(Struct, tag=True):
    source: str
    variables: Any
    limits: Limits


Task = LoadTokenizer | Encode | EncodePassages | ConvertTokenizer | CompileTemplate | RenderTemplate


class Vocabulary(Struct, frozen=True):
    """The constant properties of a tokenizer, which the worker sends once.

    vocab_size   one more than the largest id with a token
    pieces       the text of each id; None for a decoder without a table
    bound        bound on the text of one token; None if no bound is known
    special_ids  ids that `skip_special_tokens` skips
    whole_ids    ids of added tokens: encoding a text that contains such a token never spells it with other tokens
    """

    vocab_size: int
    pieces: BytePieces | TextPieces | None
    bound: Bound | None
    special_ids: frozenset[int]
    whole_ids: frozenset[int]


class Loaded(Struct, frozen=True):
    """A tokenizer's constant properties, and the tokens by id."""

    vocabulary: Vocabulary
    tokens: list[str | None]


class TemplateProperties(Struct, frozen=True):
    """The properties of a compiled template.

    reads           names of the variables that the template reads
    reads_parts     whether the template accepts content that is a list of parts
    text_arguments  whether the template requires a call's arguments as JSON text
    """

    reads: frozenset[str]
    reads_parts: bool
    text_arguments: bool


class ApartTokenizer:
    """A `tokenizer.Backend` that encodes in the worker process.

    The constructor and `encode` wait for the worker, so the event loop's thread must not call them.
    """

    def __init__(self, worker: Worker, content: bytes, additions: Additions) -> None:
        """Load the tokenizer in the worker process. Raises CheckpointError."""
        self._worker = worker
        try:
            loaded = worker.keep(LoadTokenizer(content, additions), Loaded, seconds=LOAD_S)
        except TooCostly as error:
            raise CheckpointError(f"the tokenizer {error} to load") from error
        except TextFailed as error:
            raise CheckpointError(f"the tokenizer cannot be loaded: {error}") from error
        self.vocabulary, self._tokens = loaded.vocabulary, loaded.tokens
        pieces = self.vocabulary.pieces
        if pieces is None:
            raise CheckpointError("infd has no table for its decoder, so its text cannot be streamed safely")
        self._pieces = pieces
        self._ids = {token: token_id for token_id, token in enumerate(self._tokens) if token is not None}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._ask(Encode(text, add_special_tokens), list[int])

    def encode_passages(self, passages: Sequence[Passage], cut: Cut, *, add_special_tokens: bool) -> list[Encoded]:
        return self._ask(EncodePassages(list(passages), cut, add_special_tokens), list[Encoded])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        hidden = self.vocabulary.special_ids if skip_special_tokens else frozenset()
        text = with_table(self._pieces.without(hidden) if hidden else self._pieces)
        return text.feed(ids) + text.flush()

    def id_of(self, token: str) -> int | None:
        return self._ids.get(token)

    def token(self, token_id: int) -> str | None:
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def _ask(self, task: Encode | EncodePassages, answer: type[T]) -> T:
        try:
            return self._worker.ask(task, answer, seconds=ENCODE_S)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the text is not valid Unicode at character {error.start}") from error
        except TooCostly as error:
            raise TooCostly(f"the model's tokenizer {error} over this text") from error


class ApartTemplate:
    """A `chat.Template` that renders in the worker process.

    The constructor and `render` wait for the worker, so the event loop's thread must not call them.
    """

    def __init__(self, worker: Worker, source: str) -> None:
        """Compile `source` in the worker process.

        Raises InvalidRequest for a source that does not compile, TooCostly at the time limit, TextFailed if the worker
        fails.
        """
        self._worker = worker
        self._source = source
        try:
            found = worker.ask(CompileTemplate(source), TemplateProperties, seconds=COMPILE_S)
        except TooCostly as error:
            raise TooCostly(f"the chat template {error} to compile", param="messages") from error
        self.reads = found.reads
        self.reads_parts = found.reads_parts
        self.text_arguments = found.text_arguments

    def render(self, variables: Mapping[str, Any], limits: Limits) -> str:
        try:
            return self._worker.ask(
                RenderTemplate(self._source, variables, limits), str, seconds=limits.seconds + MARGIN_S
            )
        except TooCostly as error:
            if error.param is not None:
                raise
            raise TooCostly(f"chat template: {error}", param="messages") from error
        except (msgspec.ValidationError, UnicodeEncodeError, OverflowError) as error:
            raise InvalidRequest(f"the conversation cannot be rendered: {error}", param="messages") from error


def convert(directory: Path, worker: Worker | None) -> bytes:
    """Return a tokenizer.json converted from a checkpoint's vocabulary files. Raises CheckpointError.

    worker  None: this process converts the files
    """
    if worker is None:
        from infd.text import conversion

        return conversion.convert(directory)
    try:
        return worker.ask(ConvertTokenizer(str(directory)), bytes, seconds=CONVERT_S)
    except (TooCostly, TextFailed) as error:
        raise CheckpointError(f"{directory}: its tokenizer cannot be converted: {error}") from error
