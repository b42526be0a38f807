"""The operations under load that reduce texts to numbers: their routes, and the bodies of their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.loadgen.settings import Task

Text = str | list[int]


class Operation(Struct, frozen=True):
    """An operation on texts.

    path  of its route
    body  returns the fields of a request that contain the texts
    """

    path: str
    body: Callable[[Sequence[Text]], dict[str, Any]]


OPERATIONS: Final[dict[Task, Operation]] = {
    "embed": Operation("/v1/embeddings", lambda texts: {"input": texts, "encoding_format": "base64"}),
    "classify": Operation("/classify", lambda texts: {"input": texts}),
    # The first text is also the query.
    "rerank": Operation("/rerank", lambda texts: {"query": texts[0], "documents": texts}),
}
