"""Scores of pairs of texts: by a cross-encoder, which reads both at once, or by comparing their embeddings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.errors import CannotServe, InvalidRequest, Unsupported
from infd.http.formats.numbers import numbers
from infd.http.pooling.pooling import Asker, Pooling, TemplatedPair
from infd.text.cutting import Passage, Side

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from infd.http.pooling.pooling import Input, Reduced
    from infd.http.served_model import ServedModel
    from infd.pooling.settings import Similarity

    Vector = npt.NDArray[np.float64]


class Scoring(Struct, frozen=True, kw_only=True):
    """A request for the scores of pairs of texts, in a form common to all APIs.

    queries                    one text, which is compared with all documents, or a text for each document
    where_query                returns the request field of a query, for error messages; where_document of a document
    query_tokens               most tokens of a query; None: all; document_tokens of a document
    keep, side                 see Pooling
    prompt_name                see Pooling; for embeddings only
    activation                 see `request.Pool`; for cross-encoders only
    instruction                description of the task; only for models whose chat template renders pairs
    variables                  other variables of that chat template, by name
    add_generation_prompt      see TemplatedPair
    """

    asker: Asker
    queries: Sequence[str]
    documents: Sequence[str]
    where_query: Callable[[int], str]
    where_document: Callable[[int], str]
    body_bytes: int
    query_tokens: int | None = None
    document_tokens: int | None = None
    keep: int | None = None
    side: Side = "right"
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    activation: bool | None = None
    instruction: str | None = None
    variables: Mapping[str, Any] = {}
    add_generation_prompt: bool = True

    def pooling(self, served: ServedModel) -> Pooling:
        """Return the request for the numbers from which `scores` computes the scores. Raises CannotServe."""
        if "score" not in served.tasks:
            served.require_pooling(None)
            raise CannotServe(
                f"{served.names[0]} cannot compare texts; it serves: {', '.join(served.tasks)}. A cross-encoder has one"
                " label, other models are compared by their embeddings"
            )
        templated = bool(served.pooling.label_tokens)
        self._check_fields(templated=templated)
        if served.pooling.pairs:
            if self.prompt_name is not None:
                raise InvalidRequest("prompt_name is for embeddings; this model reads pairs", param="prompt_name")
            queries = self.queries if len(self.queries) > 1 else [*self.queries] * len(self.documents)
            if templated:
                pairs = [self._pair(*each) for each in zip(queries, self.documents, strict=True)]
                return self._pooling(pairs, self.where_document, served)
            most = (self.query_tokens, self.document_tokens)
            inputs = [Passage(pair, most) for pair in zip(queries, self.documents, strict=True)]
            return self._pooling(inputs, self.where_document, served)
        inputs = [Passage((text,), (self.query_tokens,)) for text in self.queries]
        inputs += [Passage((text,), (self.document_tokens,)) for text in self.documents]
        return self._pooling(inputs, self._where, served)

    def _pair(self, query: str, document: str) -> TemplatedPair:
        variables = self.variables if self.instruction is None else {**self.variables, "instruction": self.instruction}
        return TemplatedPair(
            query=query,
            document=document,
            variables=variables,
            add_generation_prompt=self.add_generation_prompt,
        )

    def _check_fields(self, *, templated: bool) -> None:
        """Refuse the fields that would have no effect. templated: whether the chat template renders pairs."""
        if templated:
            for name, cut in (
                ("truncate_prompt_tokens", self.keep),
                ("max_tokens_per_query", self.query_tokens),
                ("max_tokens_per_doc", self.document_tokens),
            ):
                if cut is not None:
                    raise Unsupported(f"{name} with this model, whose template encloses the texts,", param=name)
            return
        for name, given in (("instruction", self.instruction), ("chat_template_kwargs", self.variables)):
            if given:
                raise Unsupported(f"{name} with this model, which reads texts without a template,", param=name)

    def _pooling(self, inputs: Sequence[Input], where: Callable[[int], str], served: ServedModel) -> Pooling:
        return Pooling(
            asker=self.asker,
            inputs=inputs,
            where=where,
            body_bytes=self.body_bytes,
            task="classify" if served.pooling.pairs else "embed",
            keep=self.keep,
            side=self.side,
            add_special_tokens=self.add_special_tokens,
            prompt_name=self.prompt_name,
            activation=self.activation,
        )

    def _where(self, number: int) -> str:
        queries = len(self.queries)
        return self.where_query(number) if number < queries else self.where_document(number - queries)


def scores(reduced: Reduced, pairs: int) -> list[float]:
    """Return the score of each of `pairs` pairs."""
    if reduced.served.pooling.pairs:
        return [numbers(pooled)[0] for pooled in reduced.pooled]
    import numpy as np  # not at start: the import takes a tenth of a second

    found = [np.frombuffer(pooled.values, dtype="<f4").astype(np.float64) for pooled in reduced.pooled]
    queries, documents = found[:-pairs], found[-pairs:]
    if len(queries) == 1:
        queries *= pairs
    measure = MEASURES[reduced.served.pooling.similarity]
    return [measure(query, document) for query, document in zip(queries, documents, strict=True)]


def _cosine(a: Vector, b: Vector) -> float:
    lengths = math.sqrt(a @ a) * math.sqrt(b @ b)
    return float(a @ b) / lengths if lengths else 0.0


def _euclidean(a: Vector, b: Vector) -> float:
    difference = a - b
    return -math.sqrt(difference @ difference)


# As sentence-transformers compares embeddings: distances are negative, so that a greater score is a closer text.
MEASURES: Final[dict[Similarity, Callable[[Vector, Vector], float]]] = {
    "cosine": _cosine,
    "dot": lambda a, b: float(a @ b),
    "euclidean": _euclidean,
    "manhattan": lambda a, b: -float(abs(a - b).sum()),
}
