"""`Pooling`: a request to reduce prompts to numbers, in a form common to all APIs. `pool.py` answers it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from infd.errors import InvalidRequest
from infd.http.generation import Conversation
from infd.http.schema.pooling import INPUTS
from infd.text.cutting import Passage, Side

if TYPE_CHECKING:
    from infd.config import Config
    from infd.http.served_model import ServedModel
    from infd.request import Pooled, PoolTask


class TemplatedPair(Struct, frozen=True, kw_only=True):
    """A query and a document, which the chat template renders as messages of these two roles.

    variables              variables of the template that the request sets, by name
    add_generation_prompt  whether the prompt ends with the opening of an assistant message
    """

    query: str
    document: str
    variables: Mapping[str, Any]
    add_generation_prompt: bool

    def conversation(self) -> Conversation:
        return Conversation(
            messages=lambda: [
                {"role": "query", "content": self.query},
                {"role": "document", "content": self.document},
            ],
            body_bytes=len(self.query) + len(self.document),
            add_generation_prompt=self.add_generation_prompt,
            template_variables=self.variables,
        )


Input = Passage | Sequence[int] | Conversation | TemplatedPair


class Asker(Struct, frozen=True, kw_only=True):
    """The fields of a request that have the same meaning in every pooling API. None: absent from the request."""

    model: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str = ""


class Pooling(Struct, frozen=True, kw_only=True):
    """A request to reduce prompts to numbers. Only bounds that depend on the model remain unchecked.

    inputs              texts, pairs, token ids or conversations, each of which becomes a prompt
    where               returns the request field of an input, for error messages, given the input's number
    body_bytes          size of the request's body
    task                of pooling; None: the model's first task
    keep                most tokens of a prompt; -1: as many as fit; None: every prompt must fit
    side                the end at which tokens are removed
    add_special_tokens  whether special tokens are added to texts
    prompt_name         name of a text that precedes each text; None: the model's default
    input_type          role of the texts, which may select a text that precedes them
    dimensions, normalize, activation  see `request.Pool`
    """

    asker: Asker
    inputs: Sequence[Input]
    where: Callable[[int], str]
    body_bytes: int
    task: PoolTask | None
    keep: int | None = None
    side: Side = "right"
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None


class Reduced(Struct, frozen=True):
    """The answer to a Pooling.

    id       of the request
    created  time of the answer, in seconds of Unix time
    model    model name that the answer reports
    task     of pooling
    prompts  token ids of each input
    skips    of each input, the leading tokens that have no numbers
    pooled   numbers of each input
    """

    id: str
    created: int
    model: str
    task: PoolTask
    served: ServedModel
    prompts: Sequence[tuple[int, ...]]
    skips: Sequence[int]
    pooled: Sequence[Pooled]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.prompts))


Body = Callable[[Reduced], Iterable[bytes]]


def numbered(param: str, *, several: bool) -> Callable[[int], str]:
    """Return the function that names the inputs in `param`, which is a list if there are several."""
    return (lambda number: f"{param}[{number}]") if several else (lambda _: param)


def require_text(text: str, param: str) -> None:
    """Raise InvalidRequest if the text of the request field `param` is empty."""
    if not text:
        raise InvalidRequest(f"{param} is empty", param=param)


def check_count(inputs: int, config: Config, param: str) -> None:
    """Raise InvalidRequest if a request has no inputs, or more than it may have."""
    most = min(INPUTS, config.scheduler.max_waiting)
    if not inputs:
        raise InvalidRequest(f"{param} is empty", param=param)
    if inputs > most:
        why = "" if most == INPUTS else " (scheduler.max_waiting)"
        raise InvalidRequest(f"{param} has {inputs} inputs; at most {most} are accepted{why}", param=param)
