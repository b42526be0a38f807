"""Choose the syntaxes of a model's thoughts and tool calls.

Settings may name the syntaxes: by infd's names, by names that other servers use, or by an entry point of another
package. By default infd finds the syntaxes in the chat template, which contains the marks of thoughts and renders calls
as the model was trained to write them; if no syntax fits the calls, in the checkpoint's response template.
"""

from __future__ import annotations

import logging
import re
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from infd.constraint import ThoughtBudget
from infd.errors import CheckpointError, ConfigError, InvalidRequest
from infd.text import answers, reasoning, tools
from infd.text.answers.response_template import ResponseTemplate
from infd.text.chat import PROBING
from infd.text.markup import Asides, Reading
from infd.text.tools.offered import Offered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infd.constraint import CallSyntax, Constraint, Header, Thought
    from infd.text.answers.base import AnswerSyntax
    from infd.text.chat import ChatTemplate, Message
    from infd.text.markup import Parser
    from infd.text.reasoning.base import ReasoningSyntax
    from infd.text.tokenizer import Tokenizer
    from infd.text.tools.base import ToolSyntax

_LOG = logging.getLogger("infd.text")

AUTO: Final = "auto"
NONE: Final = "none"
RESPONSE_TEMPLATES: Final = frozenset({"response_template", "hf"})  # parser names for ResponseTemplate
PROMPT_END: Final = 64  # number of a prompt's last characters in which a template may open or close a thought
TOOLS_GROUP: Final = "infd.tools"  # entry points that refer to a ToolSyntax
REASONING_GROUP: Final = "infd.reasoning"  # entry points that refer to a ReasoningSyntax

# Other servers' names that no syntax of infd serves, with the reason and what to set instead.
_APPENDED: Final = (
    "it leaves thoughts in the content; set --reasoning-parser minimax_m2, which returns them apart, or none"
)
REFUSED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "beam": "Beam's checkpoints state how answers are read; set --tool-parser response_template",
        "minimax_m2_append_think": _APPENDED,
        "minimax-append-think": _APPENDED,
        "musespark1x": "Muse Spark gives its channels other meanings than Muse Glimmer; infd reads muse_glimmer alone",
    }
)

_QUESTION: Final = "\ufdd1"  # a noncharacter, which no template contains
_NAME, _KEY, _VALUE = "probe_name", "probe_key", "probe_value"
# The ids of the call that probes a template. Mistral's templates refuse ids that do not have nine characters. Kimi K2's
# template writes the id instead of the name.
_IDS: Final = ("abcdefghi", f"functions.{_NAME}:0")


class Syntax(Struct, frozen=True):
    """The syntaxes of one model.

    mark_ids   ids of the marks that are special tokens; detokenizing must not skip them
    whole      syntax of thoughts and calls together; if it is set, `reasoning` and `tools` are None
    tokens     id -> mark that counts only as a token: the chat template contains the mark, and the vocabulary has it as
               an added token, so the model has not read the mark in other tokens
    """

    reasoning: ReasoningSyntax | None = None
    tools: ToolSyntax | None = None
    mark_ids: frozenset[int] = frozenset()
    whole: AnswerSyntax | None = None
    tokens: Mapping[int, str] = MappingProxyType({})

    @classmethod
    def choose(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        *,
        reasoning_name: str = AUTO,
        tools_name: str = AUTO,
        response_template: Any = None,
    ) -> Syntax:
        """Return the named syntaxes: "auto" selects the syntax of the chat template, "none" no syntax.

        response_template  from the checkpoint's tokenizer_config.json; None: there is none

        Raises ConfigError for a name that neither infd nor an installed package defines, or that names a response
        template if the checkpoint has none; CheckpointError for a named response template that cannot be read.
        """
        whole = _whole(template, reasoning_name, tools_name, response_template)
        thinking: ReasoningSyntax | None = None
        calling: ToolSyntax | None = None
        if whole is None:
            if reasoning_name == AUTO:
                reasoning_name = _thinks(template)
            if tools_name == AUTO:
                tools_name = _calls(template)
                if tools_name == NONE:
                    tools_name = _in_vocabulary(template, tokenizer)
            thinking = _named(reasoning_name, reasoning.SYNTAXES, reasoning.ALIASES, REASONING_GROUP)
            calling = _named(tools_name, tools.SYNTAXES, tools.ALIASES, TOOLS_GROUP)
        _LOG.info("markup", extra={"reasoning": reasoning_name, "tools": tools_name})
        marks = [mark for syntax in (thinking, calling, whole) if syntax is not None for mark in syntax.marks]
        ids = {mark: token_id for mark in marks if (token_id := tokenizer.id_of(mark)) is not None}
        tokens = {each: mark for mark, each in ids.items() if each in tokenizer.whole_ids and template.mentions(mark)}
        mark_ids = tokenizer.special_ids.intersection(ids.values())
        return cls(thinking, calling, mark_ids, whole, tokens)

    @property
    def reads_calls(self) -> bool:
        """Whether the tool calls of this model can be parsed."""
        return self.whole is not None or self.tools is not None

    @property
    def reads_thoughts(self) -> bool:
        """Whether the thoughts of this model can be parsed."""
        return self.whole is not None or self.reasoning is not None

    def always_thinks(self, prompt: str) -> bool:
        """Return whether infd expects a thought in every answer: the prompt opens one, or a `whole` syntax has them."""
        thought = self.thought(prompt)
        return thought is not None and (self.whole is not None or thought.inside)

    @property
    def grammar(self) -> CallSyntax | None:
        """The syntax in which a grammar forces calls; None: calls cannot be forced."""
        calling = self.whole or self.tools
        return None if calling is None else calling.grammar

    @property
    def unforced(self) -> str:
        """Why `grammar` is None, and what to set."""
        if isinstance(self.whole, ResponseTemplate):
            return self.whole.unforced
        return "their syntax is not known; --tool-parser can name it"

    def thought(self, prompt: str, continued: str = "") -> Thought | None:
        """Return how an answer marks its thought; None if the answer cannot contain a thought. See ReasoningSyntax."""
        thinking = self.whole or self.reasoning
        return None if thinking is None else thinking.thought(prompt[-PROMPT_END:], continued)

    def header(self, prompt: str, continued: str = "") -> Header | None:
        """Return the text before a constrained answer without calls; None: no text. See ReasoningSyntax."""
        thinking = self.whole or self.reasoning
        return None if thinking is None else thinking.header(prompt[-PROMPT_END:], continued)

    def budget(
        self, tokens: int, prompt: str, continued: str = "", *, calls: bool, answer: Constraint | None = None
    ) -> ThoughtBudget | None:
        """Return the constraint that ends a thought after `tokens` tokens; None if the answer cannot contain a thought.

        prompt, continued  as in ReasoningSyntax.thought
        calls              whether calls may follow the thought
        answer             further constraint of the answer; None: any text
        """
        thought = self.thought(prompt, continued)
        if thought is None:
            return None
        if self.whole is not None:
            forced = self.whole.ends(calls=calls)
            return ThoughtBudget(
                tokens,
                (thought.opening,),
                (thought.closing,),
                forced,
                inside=thought.inside,
                again=True,
                marks=self._strict,
                answer=answer,
            )
        interrupting = [f"\n{mark}" for mark in self._interrupting(calls=calls)]
        return ThoughtBudget(
            tokens,
            (thought.opening, *thought.variants),
            (thought.closing, *interrupting),
            (thought.closing,),
            inside=thought.inside,
            marks=self._strict,
            answer=answer,
        )

    def start(
        self, prompt: str, continued: str = "", *, offered: Offered | None = None, most_calls: int | None = None
    ) -> Reading | None:
        """Start parsing an answer. Returns None if all its text is content.

        prompt, continued  as in ReasoningSyntax.thought
        offered            tools that may be called; None: text that looks like a call is content
        most_calls         number of calls after which further calls are dropped; None: no limit
        """
        prompt = prompt[-PROMPT_END:]
        if self.whole is not None:
            return Reading(
                self.whole.start(prompt, continued, offered),
                most_calls=most_calls,
                tokens=self._strict,
            )
        calls: Parser | None = None
        if self.tools is not None and offered is not None:
            calls = self.tools.start(offered)
        ends = self._interrupting(calls=calls is not None)
        thoughts = None if self.reasoning is None else self.reasoning.start(prompt, continued, ends)
        if thoughts is None and calls is None:
            return None
        return Reading(thoughts, calls, most_calls=most_calls, tokens=self._strict)

    @property
    def _strict(self) -> frozenset[str]:
        return frozenset(self.tokens.values())

    def _interrupting(self, *, calls: bool) -> tuple[str, ...]:
        """Return the marks of calls that, at the beginning of a line, end a thought that the model has left open."""
        if self.tools is None or not calls:
            return ()
        # Other marks, which are words or begin with a code fence, may occur in an ordinary thought.
        return tuple(mark for mark in self.tools.opens if mark[0] in "<[")


def check_names(*, reasoning_name: str, tools_name: str) -> None:
    """Raise ConfigError for a name that `Syntax.choose` refuses for every model."""
    whole = {*answers.SYNTAXES, *answers.ALIASES, *RESPONSE_TEMPLATES}
    if not whole & {reasoning_name, tools_name}:
        for name, module, group in ((tools_name, tools, TOOLS_GROUP), (reasoning_name, reasoning, REASONING_GROUP)):
            if name != AUTO:
                _named(name, module.SYNTAXES, module.ALIASES, group)


def _named(name: str, known: Mapping[str, Any], aliases: Mapping[str, str], group: str) -> Any:
    """Return the syntax of a name, None for "none". Raises ConfigError."""
    if aliases.get(name, name) == NONE:
        return None
    if (found := known.get(aliases.get(name, name))) is not None:
        return found
    for entry in entry_points(group=group, name=name):
        try:
            return entry.load()
        except Exception as error:  # another package's code may raise any exception
            raise ConfigError(f"the parser {name!r} of {entry.value} cannot be loaded: {error}") from error
    if (reason := REFUSED.get(name)) is not None:
        raise ConfigError(f"infd has no parser {name!r}: {reason}")
    names = ", ".join(sorted({*known, *aliases}))
    raise ConfigError(f"there is no parser {name!r}; known: auto, none, {names}, entry points of {group}")


def _whole(template: ChatTemplate, reasoning_name: str, tools_name: str, response_template: Any) -> AnswerSyntax | None:
    """Return the syntax of whole answers that a setting names, or, if both are "auto", that the checkpoint uses.

    "auto" selects the checkpoint's response template if none of infd's syntaxes parses the calls of its chat template.
    """
    if RESPONSE_TEMPLATES & {reasoning_name, tools_name}:
        if response_template is None:
            raise ConfigError("the checkpoint's tokenizer_config.json has no response_template")
        return ResponseTemplate(response_template)
    for name in (tools_name, reasoning_name):
        if (found := answers.SYNTAXES.get(answers.ALIASES.get(name, name))) is not None:
            return found
    if (reasoning_name, tools_name) != (AUTO, AUTO):
        return None
    found = next((syntax for syntax in answers.SYNTAXES.values() if syntax.matches(template)), None)
    if found is None and response_template is not None and _calls(template) == NONE:
        try:
            stated = ResponseTemplate(response_template)
        except CheckpointError as error:
            _LOG.warning("response template refused", extra={"reason": str(error)})
            return None
        if stated.reads_calls or _thinks(template) == NONE:
            return stated
    return found


def _thinks(template: ChatTemplate) -> str:
    return next((name for name, syntax in reasoning.SYNTAXES.items() if syntax.matches(template)), NONE)


def _calls(template: ChatTemplate) -> str:
    """Return the name of the best syntax (see `_rank`) for a call that the template renders.

    If no syntax parses the call, see `_described`.
    """
    for id in _IDS:
        turn = _written_call(template, id)
        ranks = {name: rank for name, syntax in tools.SYNTAXES.items() if (rank := _rank(syntax, turn, template))}
        if ranks:
            return min(ranks, key=ranks.__getitem__)
    return _described(template)


def _in_vocabulary(template: ChatTemplate, tokenizer: Tokenizer) -> str:
    """Return the name of the first syntax with two or more marks, all single tokens of the vocabulary; else "none".

    Some templates (LFM2) offer tools and describe no call: their clients send earlier calls as content, with the marks.
    """
    if template.reads("tools", tools=True):
        for name, syntax in tools.SYNTAXES.items():
            if len(syntax.marks) > 1 and all(tokenizer.id_of(mark) is not None for mark in syntax.marks):
                return name
    return NONE


def _described(template: ChatTemplate) -> str:
    """Return the name of the syntax with the most marks, among those whose marks all occur in a template; else "none".

    Some templates offer tools and describe calls, but do not render calls of earlier messages.
    """
    if not template.reads("tools", tools=True):
        return NONE
    marks = {
        name: len(syntax.marks) for name, syntax in tools.SYNTAXES.items() if all(map(template.mentions, syntax.marks))
    }
    return max(marks, key=marks.__getitem__, default=NONE) if any(marks.values()) else NONE


def _written_call(template: ChatTemplate, id: str) -> str:
    function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
    schema = {"type": "object", "properties": {_KEY: {"type": "string", "description": ""}}, "required": [_KEY]}
    messages: list[Message] = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [{"id": id, "type": "function", "function": function}]},
    ]
    offered = [{"type": "function", "function": {"name": _NAME, "description": "", "parameters": schema}}]
    try:
        text = template.render(messages, tools=offered, add_generation_prompt=False, limits=PROBING)
        opened = template.render(messages[:1], tools=offered, add_generation_prompt=True, limits=PROBING)
    except InvalidRequest:
        return ""
    turn, header = text.rpartition(_QUESTION)[2], opened.rpartition(_QUESTION)[2]
    common = next((at for at, pair in enumerate(zip(turn, header, strict=False)) if pair[0] != pair[1]), len(header))
    # The texts may differ within two marks, of a call and of a thought, that begin with equal characters. So the common
    # part ends with the last complete mark or line.
    if common < len(header):
        common = max(turn.rfind(end, 0, common) for end in ">\n") + 1
    return turn[common:]


def _rank(syntax: ToolSyntax, turn: str, template: ChatTemplate) -> tuple[int, bool, bool, bool] | None:
    """Return a syntax's rank for a rendered call, lower for a better fit; None if the syntax does not parse the call.

    The rank consists of: the number of characters parsed as content; whether the grammar would force another text even
    if white space is ignored; whether the template lacks the syntax's marks; whether the grammar would force another
    text or other white space.
    """
    parser, asides = syntax.start(Offered({_NAME: b""})), Asides()
    content = parser.feed(turn, asides) + parser.finish(asides)
    aside = asides.take()
    if aside is None or [call.name for call in aside.calls] != [_NAME]:
        return None
    if not all(word in aside.calls[0].arguments for word in (_KEY, _VALUE)):
        return None
    grammar = syntax.grammar
    exact = grammar is not None and _forced(grammar).search(turn) is not None
    alike = grammar is not None and _forced(grammar, spaced=False).search("".join(turn.split())) is not None
    return len(content), not alike, not any(map(template.mentions, syntax.opens)), not exact


def _forced(grammar: CallSyntax, *, spaced: bool = True) -> re.Pattern[str]:
    """Return a pattern of the beginning of the probe's call as a grammar would force it.

    spaced  whether the pattern includes white space; if not, match it against text without white space
    """
    head, _, tail = (grammar.begin + grammar.call).partition("$arguments")
    if grammar.parameter:
        head += grammar.parameter.replace("$key", _KEY).replace("$value", _VALUE) + tail
    head = head.replace("$name", _NAME)
    return re.compile(re.sub(r"\\\$(number|id)", r"\\w+", re.escape(head if spaced else "".join(head.split()))))
