"""Answer a `Pooling` of any API: queue its prompts, collect their numbers, write the answer in the API's format."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from infd.errors import Aborted, InvalidRequest, RequestFailed
from infd.http.ending import end
from infd.http.pooling.inputs import read_inputs
from infd.http.pooling.pooling import Reduced
from infd.request import FinishReason, Pool, Pooled, Request, by_token, embeds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from infd.config import LimitsConfig
    from infd.engine.streams.stream import Choices
    from infd.http.backend import Backend
    from infd.http.exchange import Exchange
    from infd.http.pooling.inputs import PooledPrompt
    from infd.http.pooling.pooling import Body, Pooling
    from infd.http.served_model import ServedModel
    from infd.request import PoolTask

NUMBER_BYTES = 4


async def pool(pooling: Pooling, body: Body, exchange: Exchange, backend: Backend) -> Iterable[bytes]:
    """Return the body of the answer, which `body` encodes piece by piece as the caller iterates.

    Raises RequestError, and the error of a failed input. Returning, raising and cancellation all end the engine's work
    on the request.
    """
    served = backend.model()
    task = served.require_pooling(pooling.task)
    _check_dimensions(pooling, task, served)
    async with backend.engine.admit(len(pooling.inputs), pooling.body_bytes, tenant=exchange.account.tenant) as ticket:
        try:
            exchange.begin(ticket, pooling.asker.request_id)
            model, adapter = served.name(pooling.asker.model), served.adapter(pooling.asker.model)
            prompts = _beside_ends(await read_inputs(pooling, served, backend.offload), task, served)
            ids, skips = [prompt.ids for prompt in prompts], [prompt.skip for prompt in prompts]
            size = _checked_size(prompts, pooling, task, served, backend.config.limits)
            requests = [
                Request(
                    id=ticket.id if len(prompts) == 1 else f"{ticket.id}-{number}",
                    prompt=prompt.ids,
                    wants=(
                        Pool(
                            task=task,
                            dimensions=pooling.dimensions,
                            normalize=pooling.normalize,
                            activation=pooling.activation,
                            skip=prompt.skip,
                            second=prompt.second,
                        ),
                    ),
                    priority=exchange.priority(pooling.asker.priority),
                    adapter=adapter,
                    tenant=exchange.account.tenant.name,
                    share=exchange.account.tenant.share,
                    cache_salt=pooling.asker.cache_salt,
                )
                for number, prompt in enumerate(prompts)
            ]
            exchange.account.reserve(sum(map(len, ids)))
            backend.held.numbers.hold(size, exchange.held)
            choices = await ticket.submit(*requests, client=exchange.client)
            pooled = await _collect(choices, len(requests))
        finally:
            end(exchange, ticket, backend)
    if task == "token_classify":
        pooled = [_before_end(*each, served) for each in zip(pooled, ids, strict=True)]
        pooled = [_of_steps(*each, served) for each in zip(pooled, ids, skips, strict=True)]
    return body(Reduced(ticket.id, int(time.time()), model, task, served, ids, skips, pooled))


def _beside_ends(prompts: list[PooledPrompt], task: PoolTask, served: ServedModel) -> list[PooledPrompt]:
    """Return prompts without the row of a first token such as [CLS], which the model's token layers do not read.

    So do vLLM and FlagEmbedding for bge-m3, whose first hidden state is the text's embedding.
    """
    settings = served.pooling
    layer = {"token_embed": settings.token_dense, "token_classify": settings.token_weight}.get(task)
    if layer is None:
        return prompts
    first = served.tokenizer.ids_of("cls_token", "bos_token")
    return [replace(each, skip=max(each.skip, int(each.ids[0] in first))) for each in prompts]


def _before_end(pooled: Pooled, ids: Sequence[int], served: ServedModel) -> Pooled:
    """Return the weights of tokens without that of the token that ends the prompt; labels as they are."""
    if served.pooling.token_weight is None or ids[-1] not in served.tokenizer.ids_of("eos_token", "sep_token"):
        return pooled
    return Pooled(pooled.width, pooled.values[: -NUMBER_BYTES * pooled.width])


def _of_steps(pooled: Pooled, ids: Sequence[int], skip: int, served: ServedModel) -> Pooled:
    """Return the labels of the tokens that end steps, for a model that judges steps; other labels as they are."""
    if (token := served.pooling.step_token) is None:
        return pooled
    size = NUMBER_BYTES * pooled.width
    ends = [at * size for at, each in enumerate(ids[skip:]) if each == token]
    return Pooled(pooled.width, b"".join(pooled.values[at : at + size] for at in ends))


async def _collect(choices: Choices, inputs: int) -> list[Pooled]:
    """Return the numbers of all inputs. Raises the error of the first that fails."""
    found: dict[int, Pooled] = {}
    while len(found) < inputs:
        index, delta = await anext(choices)
        if delta.pooled is not None:
            found[index] = delta.pooled
        elif delta.finish is FinishReason.ABORT:
            raise Aborted
        elif delta.finish is not None:
            error = delta.error or RequestFailed("the engine gave no reason")
            raise error.with_traceback(None)  # several streams may raise one error object, whose traceback would grow
    return [found[index] for index in range(inputs)]


def _check_dimensions(pooling: Pooling, task: PoolTask, served: ServedModel) -> None:
    """Raise InvalidRequest if the model's embeddings cannot be cut to this length."""
    wanted, settings = pooling.dimensions, served.pooling
    if wanted is None:
        return
    if not embeds(task):
        raise InvalidRequest(f"dimensions is only for embeddings, not for the task {task}", param="dimensions")
    if settings.matryoshka and wanted not in (*settings.matryoshka, settings.dimensions):
        trained = ", ".join(map(str, settings.matryoshka))
        raise InvalidRequest(f"dimensions is one of {trained}: this model is trained for these", param="dimensions")
    if wanted > (most := settings.width(task)):
        raise InvalidRequest(f"dimensions is at most {most}, the length of this model's embeddings", param="dimensions")


def _checked_size(
    prompts: Sequence[PooledPrompt], pooling: Pooling, task: PoolTask, served: ServedModel, limits: LimitsConfig
) -> int:
    """Return the bytes of the numbers of all inputs. Raises InvalidRequest if these exceed limits.pooled_bytes."""
    settings = served.pooling
    width = pooling.dimensions or settings.width(task)
    tokens = by_token(task)
    rows = sum(len(prompt.ids) - prompt.skip for prompt in prompts) if tokens else len(prompts)
    if (size := rows * width * NUMBER_BYTES) > limits.pooled_bytes:
        raise InvalidRequest(
            f"the numbers of {'all tokens of ' if tokens else ''}{len(prompts)} inputs are {size} bytes; at most"
            f" {limits.pooled_bytes} are computed at once (limits.pooled_bytes): send fewer or shorter inputs",
            param=pooling.where(0).partition("[")[0],
        )
    return size
