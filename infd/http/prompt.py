"""Turn a request's input into token ids: render conversations, encode texts, truncate prompts, encode bad words."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.errors import InvalidRequest, PromptTooLong, TooCostly, Unsupported
from infd.http import sampling
from infd.http.generation import Conversation
from infd.text.effort import (
    BUDGET,
    SWITCHES,
    VERBOSITY,
    levels,
    nearest,
    renamed,
    switched,
    switching_word,
    with_word,
)
from infd.text.fuel import BRIEF
from infd.text.infill import Gap
from infd.text.syntax import PROMPT_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from infd.http.generation import Generation
    from infd.http.served_model import ServedModel
    from infd.offload import Offload
    from infd.text.fuel import Limits

# Encoding this many characters takes about 4 ms. Longer texts are encoded on a thread, because on the event loop
# the encoding would delay the tokens of all streams.
SHORT_CHARACTERS: Final = 4096
# Encoding this many characters takes about 50 ms. Texts up to this length share the thread `Offload.short`; longer
# texts use Offload's pool, so that shorter texts do not wait for them.
ORDINARY_CHARACTERS: Final = 2**16
SHORT_WORDS: Final = 64
# A text longer than max(FREE_CHARACTERS, CHARACTERS_PER_TOKEN times the context length) is refused. Few texts have more
# characters per token; encoding 1 MiB takes 1 s.
CHARACTERS_PER_TOKEN: Final = 16
FREE_CHARACTERS: Final = 2**20
# Maximum tokens, and maximum characters, of all bad words of a request together, because every step compares the
# generated tokens with all bad words.
BAD_WORD_TOKENS: Final = 2**14


class Prompt(Struct, frozen=True):
    """One prompt as token ids.

    text     the text that was encoded; None for prompts sent as token ids, and for truncated prompts
    end      last characters of a rendered conversation, where the template may have opened a thought
    end_ids  token ids that end the answer, beside the model's own
    """

    ids: tuple[int, ...]
    text: str | None = None
    end: str = ""
    end_ids: frozenset[int] = frozenset()


async def read_prompts(generation: Generation, served: ServedModel, offload: Offload) -> list[Prompt]:
    """Return the prompts, truncated to truncate_prompt_tokens. Raises InvalidRequest, Unsupported, PromptTooLong."""
    fields = generation.fields
    must_fit = fields.truncate_prompt_tokens is None
    if isinstance(generation.input, Conversation):
        prompt = await render(
            generation.input,
            served,
            offload,
            add_special_tokens=fields.add_special_tokens,
            must_fit=must_fit,
            param=generation.prompt_param,
        )
        return [_truncated(prompt, generation, served)]
    prompts: list[Prompt] = []
    for source in generation.input.prompts:
        if isinstance(source, Gap):
            prompts.append(await _infill(source, generation, served, offload))
            continue
        if isinstance(source, str):
            check_length(source, served, param=generation.prompt_param, must_fit=must_fit)
            special = fields.add_special_tokens is not False
            prompt = Prompt(await encode(source, served, offload, add_special_tokens=special), source)
        else:
            sampling.check_ids(source, served, generation.prompt_param)
            prompt = Prompt(tuple(source))
        prompts.append(_truncated(prompt, generation, served))
    return prompts


async def _infill(gap: Gap, generation: Generation, served: ServedModel, offload: Offload) -> Prompt:
    """Return the prompt whose answer fills a gap. Raises InvalidRequest, Unsupported, PromptTooLong."""
    infill = served.infill
    if infill is None:
        raise Unsupported(
            f"{gap.param} with this model, whose vocabulary has no tokens for filling in the middle,", param=gap.param
        )
    if generation.fields.truncate_prompt_tokens is not None:
        raise Unsupported(f"truncate_prompt_tokens with {gap.param}", param="truncate_prompt_tokens")
    if not isinstance(gap.prefix, str):
        sampling.check_ids(gap.prefix, served, generation.prompt_param)
    characters, most = gap.characters, max(FREE_CHARACTERS, CHARACTERS_PER_TOKEN * served.max_model_len)
    if characters > most:
        raise InvalidRequest(
            f"the texts are {characters} characters; at most {most} are read",
            param=gap.param,
            code="context_length_exceeded",
        )
    if served.tokenizer.apart:
        ids = await offload.apart(infill.prompt, gap)
    elif characters <= SHORT_CHARACTERS:
        ids = infill.prompt(gap)
    else:
        ids = await (offload.short if characters <= ORDINARY_CHARACTERS else offload)(infill.prompt, gap)
    return Prompt(tuple(ids), end_ids=infill.end_ids)


def check_length(text: str, served: ServedModel, *, param: str, must_fit: bool) -> None:
    """Refuse a text that is certainly too long, without encoding the text. Raises PromptTooLong, InvalidRequest.

    must_fit  whether the text must fit the context; false if the server truncates the text or only counts its tokens

    Texts that need not fit are bounded too, because encoding 1 MB occupies one of a few threads for almost a second,
    which delays other requests, and takes about 50 MB of memory for the tokens.
    """
    max_characters = max(FREE_CHARACTERS, CHARACTERS_PER_TOKEN * served.max_model_len)
    if len(text) > max_characters:
        raise InvalidRequest(
            f"the text is {len(text)} characters; at most {max_characters} are read",
            param=param,
            code="context_length_exceeded",
        )
    if not must_fit:
        return
    min_tokens, limit = served.tokenizer.least_tokens(text), served.max_model_len - 1
    if min_tokens > limit:
        raise PromptTooLong(min_tokens, limit, at_least=True, param=param)


async def encode(text: str, served: ServedModel, offload: Offload, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Return the token ids of a text. Long texts are encoded on a thread; some tokenizers run in the worker process."""
    if served.tokenizer.apart:
        return await offload.apart(_encode, text, served, add_special_tokens=add_special_tokens)
    if len(text) <= SHORT_CHARACTERS:
        return _encode(text, served, add_special_tokens=add_special_tokens)
    run = offload.short if len(text) <= ORDINARY_CHARACTERS else offload
    return await run(_encode, text, served, add_special_tokens=add_special_tokens)


async def decode(ids: Sequence[int], served: ServedModel, offload: Offload, *, skip_special_tokens: bool) -> str:
    """Return the text of token ids. Long lists are decoded on a thread."""
    decode = served.tokenizer.decode
    if len(ids) <= SHORT_CHARACTERS:
        return decode(ids, skip_special_tokens=skip_special_tokens)
    return await offload(decode, ids, skip_special_tokens=skip_special_tokens)


async def text_of(prompt: Prompt, served: ServedModel, offload: Offload, *, skip_special_tokens: bool) -> str:
    """Return a prompt's text: the text that was encoded, else the decoded token ids."""
    if prompt.text is not None:
        return prompt.text
    return await decode(prompt.ids, served, offload, skip_special_tokens=skip_special_tokens)


async def bad_word_ids(words: Sequence[str], served: ServedModel, offload: Offload) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that must not be generated; see `_bad_word_ids`. Raises InvalidRequest."""
    if not words:
        return ()
    if sum(map(len, words)) > BAD_WORD_TOKENS:
        raise InvalidRequest(f"bad_words come to more than {BAD_WORD_TOKENS} characters", param="bad_words")
    if served.tokenizer.apart:
        sequences = await offload.apart(_bad_word_ids, words, served)
    else:
        sequences = (
            _bad_word_ids(words, served) if len(words) <= SHORT_WORDS else await offload(_bad_word_ids, words, served)
        )
    if sum(map(len, sequences)) > BAD_WORD_TOKENS:
        raise InvalidRequest(f"bad_words come to more than {BAD_WORD_TOKENS} tokens", param="bad_words")
    return sequences


async def predicted_ids(text: str, served: ServedModel, offload: Offload, *, drafted: bool) -> tuple[int, ...]:
    """Return the tokens of a request's prediction, at most a context of them. Raises InvalidRequest.

    drafted  whether predictions are drafted; if not, the text is only checked
    """
    check_length(text, served, param="prediction.content", must_fit=False)
    if not drafted or not text:
        return ()
    ids = await encode(text, served, offload, add_special_tokens=False)
    return ids[: served.max_model_len]


async def render(
    conversation: Conversation,
    served: ServedModel,
    offload: Offload,
    *,
    add_special_tokens: bool | None,
    must_fit: bool,
    param: str = "messages",
) -> Prompt:
    """Render a conversation with the model's chat template, and encode the text.

    Templates write special tokens themselves, so encoding adds special tokens only if the request sets
    add_special_tokens. Raises InvalidRequest, Unsupported; with `must_fit`, PromptTooLong for a text that is certainly
    too long.
    """
    served.require_template(param)
    continues = conversation.continued is not None
    opens_answer = conversation.add_generation_prompt
    if opens_answer and continues:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )

    added = _switch_word(conversation, served)

    def work(limits: Limits | None = None) -> Prompt:
        messages = conversation.messages()
        text = served.template.render(
            with_word(messages, added) if added else messages,
            tools=None if conversation.tools is None else conversation.tools(),
            documents=_documents(conversation, served),
            add_generation_prompt=not continues if opens_answer is None else opens_answer,
            continue_final_message=continues,
            kwargs=template_variables(conversation, served),
            limits=limits,
        )
        check_length(text, served, param=param, must_fit=must_fit)
        special = bool(add_special_tokens) and not served.template.begins_with_bos(text)
        return Prompt(_encode(text, served, add_special_tokens=special), text, text[-PROMPT_END:])

    if served.template.apart or served.tokenizer.apart:
        return await offload.apart(work)
    body_bytes = conversation.body_bytes
    if body_bytes <= SHORT_CHARACTERS:
        # How long a checkpoint's template takes is unknown. Rendering is tried on the event loop for at most a few
        # milliseconds; a rendering that takes longer is repeated on a thread with the full time limit.
        with suppress(TooCostly):
            return work(BRIEF)
    return await (offload.short(work) if SHORT_CHARACTERS < body_bytes <= ORDINARY_CHARACTERS else offload(work))


def template_variables(conversation: Conversation, served: ServedModel) -> dict[str, Any]:
    """Return the variables that a request sets in the template; chat_template_kwargs overrides other fields.

    If the request switches thoughts or sets their effort, a short question is rendered to test the value. Raises
    Unsupported if the template refuses the value, or does not read a variable that the switch or effort needs.
    """
    thinking, template, tools = conversation.thinking, served.template, conversation.tools is not None
    variables = renamed(conversation.template_variables, template, tools=tools)
    if thinking.budget is not None and template.reads(BUDGET, tools=tools):
        variables = {BUDGET: thinking.budget} | variables
    variables = _verbosity(conversation, served) | variables
    if thinking.preferred is not None:
        variables |= nearest(template, thinking.preferred, tools=tools)
    on = thinking.enabled if thinking.effort is None else thinking.effort != "none"
    if on is None:
        return variables
    param = thinking.params["enabled" if thinking.effort is None else "effort"]
    if (not on or thinking.effort is None) and switching_word(template, on=on, tools=tools):
        return variables
    found = switched(template, on=on, effort=thinking.effort, tools=tools)
    if not found and on and (thinking.effort is not None or not served.syntax.reads_thoughts):
        raise Unsupported(f"{param} with this model, whose chat template reads none,", param=param)
    if not found and not on and served.syntax.always_thinks(template.opening(tools=tools)):
        raise Unsupported(
            "switching off the thoughts of this model, whose chat template cannot"
            " (thinking_token_budget: 0 ends them at once),",
            param=param,
        )
    if not template.accepts(found, tools=tools):
        known = ", ".join(levels(template, tools=tools))
        which = f"accepts only {known}" if thinking.effort is not None and known else "refuses it"
        raise Unsupported(f"{param} {thinking.effort!r} with this model, whose chat template {which},", param=param)
    return found | variables


def _verbosity(conversation: Conversation, served: ServedModel) -> dict[str, Any]:
    """Return the variable that sets the answer's verbosity, if the template reads one. Raises Unsupported."""
    if conversation.verbosity is None:
        return {}
    value, param = conversation.verbosity
    if served.template.reads(VERBOSITY, tools=conversation.tools is not None):
        return {VERBOSITY: value}
    if value != "medium":  # the answer's usual length, which a template that reads no verbosity gives
        raise Unsupported(f"{param} {value!r} with this model, whose chat template reads none,", param=param)
    return {}


def _switch_word(conversation: Conversation, served: ServedModel) -> str:
    """Return the word that switches thoughts as the request demands; empty: the template reads none, or no demand."""
    thinking = conversation.thinking
    on = thinking.enabled if thinking.effort is None else thinking.effort != "none"
    for name, values in SWITCHES.items():
        if conversation.template_variables.get(name) in values:
            on = conversation.template_variables[name] == values[0]
    return "" if on is None else switching_word(served.template, on=on, tools=conversation.tools is not None)


def _documents(conversation: Conversation, served: ServedModel) -> list[dict[str, Any]] | None:
    if conversation.documents is None:
        return None
    if not served.template.reads("documents", tools=conversation.tools is not None):
        raise Unsupported("documents with this model, whose chat template reads none,", param="documents")
    return conversation.documents()


def _truncated(prompt: Prompt, generation: Generation, served: ServedModel) -> Prompt:
    """Return a prompt, truncated to its last tokens if the request sets truncate_prompt_tokens."""
    keep = generation.fields.truncate_prompt_tokens
    if keep == -1:
        max_tokens = generation.default_max_tokens if generation.max_tokens is None else generation.max_tokens
        keep = max(1, served.max_model_len - max(1, max_tokens or 1))
    return prompt if keep is None or len(prompt.ids) <= keep else Prompt(prompt.ids[-keep:], end=prompt.end)


def _encode(text: str, served: ServedModel, *, add_special_tokens: bool) -> tuple[int, ...]:
    return tuple(served.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _bad_word_ids(words: Sequence[str], served: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Encode each word without a preceding space, and also with a space if the space changes the first token but not
    the number of tokens. vLLM defines bad words in this way.
    """
    sequences: list[tuple[int, ...]] = []
    for number, word in enumerate(words):
        bare = _encode(word.lstrip(), served, add_special_tokens=False)
        if not bare:
            raise InvalidRequest("a bad word is not empty and not only spaces", param=f"bad_words[{number}]")
        spaced = _encode(" " + word.lstrip(), served, add_special_tokens=False)
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))
