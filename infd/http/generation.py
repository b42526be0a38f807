"""`Generation`: a request for text in a form common to all APIs. `generate.py` answers a `Generation`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from infd.http.thinking import Thinking

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from infd.http.beams import Search
    from infd.http.constraints import Constrained, ConstrainedCalls
    from infd.http.schema.sampling import GenerationFields
    from infd.http.schema.thinking import Verbosity
    from infd.text.infill import Gap
    from infd.text.tools.offered import Offered


class Conversation(Struct, frozen=True, kw_only=True):
    """One prompt: messages and tools that the model's chat template renders.

    messages               returns the messages as dicts for the template; raises RequestError; called on a thread if
                           the body is large
    body_bytes             size of the request's body, and of the stored items that precede its messages
    tools                  returns the tools as dicts for the template, as `messages` does; None: no tools
    documents              returns texts that the answer may cite, as dicts for the template; None: no documents
    offered                tools that an answer may call; None: text that looks like a call is content
    max_calls              maximum tool calls in one choice, further calls are dropped; None: no limit
    constrained_calls      the constraint of tool calls; None: unconstrained
    add_generation_prompt  whether the prompt ends with the opening of an assistant message; None: false if the answer
                           continues the final message, else true
    continued              text of the final message, which the answer continues; None: the answer is a new message
    thinking               the request's settings for thoughts: effort, switch and budget
    verbosity              how long the answer should be, and the request field that says so; None: not requested
    template_variables     variables of the chat template that the request sets, by name
    """

    messages: Callable[[], list[dict[str, Any]]]
    body_bytes: int
    tools: Callable[[], list[dict[str, Any]]] | None = None
    documents: Callable[[], list[dict[str, Any]]] | None = None
    offered: Offered | None = None
    max_calls: int | None = None
    constrained_calls: ConstrainedCalls | None = None
    add_generation_prompt: bool | None = None
    continued: str | None = None
    thinking: Thinking = Thinking()
    verbosity: tuple[Verbosity, str] | None = None
    template_variables: Mapping[str, Any] = {}


class Texts(Struct, frozen=True):
    """One or more prompts; each is a text to encode, token ids, or a gap to fill."""

    prompts: Sequence[str | Sequence[int] | Gap]


class Generation(Struct, frozen=True, kw_only=True):
    """A request for text, in a form common to all APIs. Only bounds that depend on the model remain unchecked.

    fields              the request; only fields with the same name and meaning in every API are read
    input               conversation or texts that become the prompts
    prompt_param        request field that contains the prompts, for error messages
    body_bytes          size of the request's body, and of the stored items that precede its input
    choices             choices generated for each prompt
    returned            choices returned for each prompt; if fewer than `choices`, the likeliest are returned
    max_tokens          maximum tokens of a choice; None: default_max_tokens; if both are None, the rest of the context
    max_tokens_param    request field of max_tokens, for error messages
    logprobs            see SamplingParams
    prompt_logprobs     number of likeliest tokens at each prompt position, by the request field that sets the number
    routed              whether each choice reports the experts that its tokens chose
    prompt_repeats      number of a prompt's choices that repeat the prompt's log-probabilities
    constrained         the constraint of the answers' content; None: any text
    search              the beam search that finds the answers; None: they are sampled
    echo                whether each choice begins with its prompt
    prediction          text that much of each answer is expected to repeat; None: none is given
    """

    fields: GenerationFields
    input: Conversation | Texts
    prompt_param: str
    body_bytes: int
    choices: int = 1
    returned: int = 1
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    default_max_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    logprobs: int | None = None
    prompt_logprobs: Mapping[str, int] = {}
    routed: bool = False
    prompt_repeats: int = 1
    constrained: Constrained | None = None
    search: Search | None = None
    echo: bool = False
    prediction: str | None = None

    @property
    def total_choices(self) -> int:
        """Choices generated for all prompts."""
        return self.choices * self._prompts

    @property
    def places(self) -> int:
        """Choices that the engine computes at once."""
        return self.total_choices if self.search is None else self.search.width * self._prompts

    @property
    def _prompts(self) -> int:
        return len(self.input.prompts) if isinstance(self.input, Texts) else 1
