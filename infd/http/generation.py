"""What every API asks for, in one form: a `Generation`. `generate.py` answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infd.http.schema.sampling import GenerationFields


class Conversation(Struct, frozen=True, kw_only=True):
    """One prompt: messages and tools that the model's chat template renders.

    messages               returns the messages as templates read them; called on a thread where the body is large,
                           raises RequestError
    tools                  the same for the tools
    tool_names             of the tools that an answer may call; None: an answer that looks like a call is content
    max_calls              in one choice, further ones are dropped; None: any number
    add_generation_prompt  whether the prompt ends with the opening of an assistant message; None: unless
                           continue_final_message
    continued              text of the final message, which the answer continues; None: the answer is a new message
    effort                 of reasoning; None: not given
    template_variables     that the request sets itself
    """

    messages: Callable[[], list[dict[str, Any]]]
    tools: Callable[[], list[dict[str, Any]]] | None = None
    tool_names: Sequence[str] | None = None
    max_calls: int | None = None
    add_generation_prompt: bool | None = None
    continued: str | None = None
    effort: str | None = None
    template_variables: Mapping[str, Any] = {}


class Texts(Struct, frozen=True):
    """One prompt or several: each a text to encode, or token ids."""

    prompts: Sequence[str | Sequence[int]]


class Generation(Struct, frozen=True, kw_only=True):
    """What a request asks for, whichever API it came by. Bounds are checked, except those that depend on the model.

    fields              that have the same name and meaning in every API
    input               what the prompts are made of
    prompt_param        field that the prompts come from, for error messages
    body_bytes          size of the request's body
    choices             generated for each prompt
    returned            of these; where fewer, the likeliest
    max_tokens          of a choice; None: default_max_tokens, or all that fit if that is None too
    logprobs            as in SamplingParams
    prompt_logprobs     Score.top, by each field of the request that asks for prompt log-probabilities
    prompt_repeats      choices of a prompt that repeat its log-probabilities
    echo                whether each choice begins with its prompt
    """

    fields: GenerationFields
    input: Conversation | Texts
    prompt_param: str
    body_bytes: int
    choices: int = 1
    returned: int = 1
    max_tokens: int | None = None
    default_max_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: Mapping[str, int] = {}
    prompt_repeats: int = 1
    echo: bool = False

    @property
    def total_choices(self) -> int:
        """Choices generated for all prompts together."""
        return self.choices * (len(self.input.prompts) if isinstance(self.input, Texts) else 1)
