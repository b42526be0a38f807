"""Turn the inputs of a `Pooling` into token ids: join prompts by name, encode, render conversations, cut."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from infd.errors import CannotServe, InvalidRequest, shorten
from infd.http.generation import Conversation
from infd.http.pooling.pooling import TemplatedPair
from infd.http.prompt import CHARACTERS_PER_TOKEN, FREE_CHARACTERS, ORDINARY_CHARACTERS, SHORT_CHARACTERS, render
from infd.http.sampling import check_ids
from infd.text.cutting import Cut, Passage

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infd.http.pooling.pooling import Pooling
    from infd.http.prompt import Prompt
    from infd.http.served_model import ServedModel
    from infd.offload import Offload
    from infd.text.cutting import Encoded
    from infd.text.tokenizer import Tokenizer

# Names of the prompts that a role selects, in the words of other APIs.
ROLES = {
    "query": ("query", "search_query"),
    "search_query": ("search_query", "query"),
    "document": ("document", "passage", "search_document"),
    "passage": ("passage", "document", "search_document"),
    "search_document": ("search_document", "document", "passage"),
}


class PooledPrompt(Struct, frozen=True):
    """One prompt as token ids. skip, second: see `request.Pool`."""

    ids: tuple[int, ...]
    skip: int = 0
    second: int | None = None


async def read_inputs(pooling: Pooling, served: ServedModel, offload: Offload) -> list[PooledPrompt]:
    """Return a prompt for each input. Raises InvalidRequest, Unsupported, TooCostly, TextFailed."""
    most = served.most_input_tokens
    keep = most if pooling.keep == -1 else pooling.keep
    prompts: dict[int, PooledPrompt] = {}
    passages: dict[int, Passage] = {}
    for number, each in enumerate(pooling.inputs):
        if isinstance(each, Passage):
            passages[number] = each
            continue
        if isinstance(each, TemplatedPair):
            ids = await _rendered_pair(each, pooling, served, offload, pooling.where(number))
        elif isinstance(each, Conversation):
            ids = (await _rendered(each, pooling, served, offload, pooling.where(number))).ids
        else:
            check_ids(each, served, pooling.where(number))
            ids = tuple(each)
        if keep is not None and len(ids) > keep:
            ids = ids[:keep] if pooling.side == "right" else ids[-keep:]
        prompts[number] = PooledPrompt(ids)
    name, prefix = _prefix(pooling, served)
    if passages:
        if prefix or served.pooling.lower_case:
            passages = {number: _prefixed(each, prefix, served) for number, each in passages.items()}
        size = _check_lengths(passages, pooling, served, must_fit=keep is None)
        skip = await _prefix_tokens(prefix, pooling, served, offload)
        encoded = await _encode(list(passages.values()), size, Cut(keep, pooling.side), pooling, served, offload)
        for number, found in zip(passages, encoded, strict=True):
            ids = tuple(found.ids)
            prompts[number] = PooledPrompt(ids, min(skip, len(ids)), found.second)
    elif pooling.prompt_name is not None or pooling.input_type is not None:
        raise InvalidRequest(
            f"the prompt {shorten(name or '')!r} precedes texts only: token ids and conversations contain theirs",
            param="prompt_name" if pooling.prompt_name is not None else "input_type",
        )
    ordered = [prompts[number] for number in range(len(pooling.inputs))]
    for number, prompt in enumerate(ordered):
        if not prompt.ids:
            raise InvalidRequest(f"{pooling.where(number)} is empty: it has no tokens", param=pooling.where(number))
        if len(prompt.ids) > most:
            raise _too_long(len(prompt.ids), most, pooling.where(number))
    if mark := served.pooling.text_mark:
        ordered = [replace(each, skip=_before_text(each.ids, mark.encode(), served.tokenizer)) for each in ordered]
    return ordered


def _before_text(ids: Sequence[int], mark: bytes, tokenizer: Tokenizer) -> int:
    """Return the number of leading tokens up to the end of `mark`; without it, 1 if the first token is special.

    A token that contains more than the end of the mark belongs to the text.
    """
    ends = list(accumulate(len(tokenizer.piece(token)) for token in ids))
    at = b"".join(map(tokenizer.piece, ids)).find(mark)
    if at < 0:
        return int(ids[0] in tokenizer.special_ids)
    return bisect_right(ends, at + len(mark))


def _prefix(pooling: Pooling, served: ServedModel) -> tuple[str | None, str]:
    """Return the name and the text of the prompt that precedes texts. Raises InvalidRequest for an unknown name."""
    prompts = served.pooling.prompts
    if (name := pooling.prompt_name) is not None:
        if name not in prompts:
            raise InvalidRequest(f"{shorten(name)!r} is no prompt of this model{_known(prompts)}", param="prompt_name")
        return name, prompts[name]
    if (role := pooling.input_type) is not None:
        for name in ROLES.get(role, (role,)):
            if name in prompts:
                return name, prompts[name]
        raise InvalidRequest(
            f"no prompt of this model is for input_type {shorten(role)!r}{_known(prompts)}", param="input_type"
        )
    name = served.pooling.default_prompt
    return name, "" if name is None else prompts.get(name, "")


def _known(prompts: Mapping[str, str]) -> str:
    return f"; there are {', '.join(prompts)}" if prompts else ", which has none"


def _prefixed(passage: Passage, prefix: str, served: ServedModel) -> Passage:
    first, *rest = passage.texts
    texts = (prefix + first, *rest)
    if served.pooling.lower_case:
        texts = tuple(text.lower() for text in texts)
    return Passage(texts, passage.most)


async def _prefix_tokens(prefix: str, pooling: Pooling, served: ServedModel, offload: Offload) -> int:
    """Return the number of leading tokens that pooling leaves out, as sentence-transformers counts them."""
    if not prefix or served.pooling.include_prompt:
        return 0
    (found,) = await _encode([Passage((prefix,))], len(prefix), Cut(), pooling, served, offload)
    return len(found.ids) - (bool(found.ids) and found.ids[-1] in served.tokenizer.special_ids)


async def _rendered(
    conversation: Conversation, pooling: Pooling, served: ServedModel, offload: Offload, param: str
) -> Prompt:
    special = pooling.add_special_tokens
    return await render(conversation, served, offload, add_special_tokens=special, must_fit=False, param=param)


async def _rendered_pair(
    pair: TemplatedPair, pooling: Pooling, served: ServedModel, offload: Offload, param: str
) -> tuple[int, ...]:
    """Return the ids of a rendered pair. Raises CannotServe if there is no template, or it leaves out a text."""
    if not served.template:
        raise CannotServe(
            f"{served.names[0]} has no chat template, which renders a query and a document; start infd with"
            " --chat-template FILE, the template for reranking"
        )
    prompt = await _rendered(pair.conversation(), pooling, served, offload, param)
    shown = prompt.text or ""
    if not all(text.strip() in shown for text in (pair.query, pair.document)):
        raise CannotServe(
            f"the chat template of {served.names[0]} does not render messages of the roles query and document; start"
            " infd with --chat-template FILE, the template for reranking"
        )
    return prompt.ids


def _check_lengths(passages: dict[int, Passage], pooling: Pooling, served: ServedModel, *, must_fit: bool) -> int:
    """Refuse texts that are certainly too long, without encoding them. Raises InvalidRequest.

    Returns the number of characters of all texts.
    """
    most, characters = served.most_input_tokens, max(FREE_CHARACTERS, CHARACTERS_PER_TOKEN * served.max_model_len)
    total = 0
    for number, passage in passages.items():
        size = sum(map(len, passage.texts))
        total += size
        if size > characters:
            raise InvalidRequest(
                f"{pooling.where(number)} is {size} characters; at most {characters} are read",
                param=pooling.where(number),
                code="context_length_exceeded",
            )
        # Few texts have less than a character per token.
        if must_fit and size > most and not any(passage.most):
            least = sum(map(served.tokenizer.least_tokens, passage.texts))
            if least > most:
                raise _too_long(least, most, pooling.where(number), at_least=True)
    return total


def _too_long(tokens: int, most: int, where: str, *, at_least: bool = False) -> InvalidRequest:
    return InvalidRequest(
        f"{where} is {'at least ' if at_least else ''}{tokens} tokens; this model's maximum context length is {most}"
        " tokens (truncate_prompt_tokens: -1, or truncate: true in the API of text-embeddings-inference, cuts what is"
        " too long)",
        param=where,
        code="context_length_exceeded",
    )


async def _encode(
    passages: Sequence[Passage], characters: int, cut: Cut, pooling: Pooling, served: ServedModel, offload: Offload
) -> list[Encoded]:
    """Encode passages of so many characters: few short ones at once, others on a thread, all by one call."""

    def work() -> list[Encoded]:
        special = pooling.add_special_tokens is not False
        return served.tokenizer.encode_passages(passages, cut, add_special_tokens=special)

    if served.tokenizer.apart:
        return await offload.apart(work)
    if characters <= SHORT_CHARACTERS and len(passages) <= SHORT_CHARACTERS // 64:
        return work()
    return await (offload.short if characters <= ORDINARY_CHARACTERS else offload)(work)
