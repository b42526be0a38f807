"""Render a conversation into a prompt of the form that the model was trained on.

Renders the same bytes as transformers' `apply_chat_template`, without importing
transformers. The template is untrusted code: `sandbox.py` runs the template, in a
worker process if `vetting` objects to the template.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import TemplateSyntaxError, meta

from infd.errors import ConfigError, InvalidRequest, TextFailed, TooCostly, without_frames
from infd.text import dialects, renderers, vetting
from infd.text.apart import ApartTemplate
from infd.text.fuel import Exhausted, Limits
from infd.text.sandbox import Sandbox

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from infd.apart.client import Worker
    from infd.text.renderers.base import Renderer
    from infd.text.template import Template
    from infd.text.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS: Final = 2**19  # the largest of the tests' published templates has 18,651 characters
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_LOG = logging.getLogger("infd.text")
_END_MARK = "\ufdd0 "  # a noncharacter marks the final message's end; the space shows whether a template trims messages
_PROBE = "\ufdd1"
_NO_TOKENS: Final = {"bos_token": "", "eos_token": ""}  # templates concatenate them, so they must not be undefined
_CALL_NAME: Final = "infd_call"
_PROBE_TOOLS: Final = [
    {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
]
_CALL_ID = "abcdefghi"  # templates of Mistral refuse ids of other lengths
PROBING: Final = Limits(fuel=2**20, seconds=1.0)  # for the one-word messages that probe a template

Message = dict[str, Any]


class ChatTemplate:
    """A model's chat templates. Any thread may render."""

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, str] | None = None,
        *,
        worker: Worker | None = None,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Store the templates, which are compiled at first use.

        sources    templates by name, "default" or "tool_use"
        variables  tokens by role, such as bos_token, which templates read as variables
        worker     runs the templates that `vetting` objects to; None: all templates run in this process
        """
        self._sources = dict(sources)
        self._variables = dict(variables or {})
        self._worker = worker
        self._limits = limits
        self._now = now
        self._probed: dict[tuple[Any, ...], str | None] = {}
        self._contents: dict[str, Message] = {}  # by name; see _beside_calls
        self._compiled: dict[str, Template | InvalidRequest] = {}  # by name; the error if compilation failed

    @classmethod
    def load(
        cls,
        tokenizer: Tokenizer,
        file: str | Path | None = None,
        worker: Worker | None = None,
        *,
        renderer: str = renderers.AUTO,
    ) -> ChatTemplate:
        """Return the template in `file`; without a file, a family's renderer or the checkpoint's templates.

        A missing or broken template of the checkpoint is only logged, because completions work without a template; chat
        requests are then refused. Raises ConfigError for a broken `file`, and the errors of `renderers.choose`.
        """
        files = tokenizer.files
        if file is not None:
            return cls.of_file(file, files.special_tokens, worker)
        chosen = renderers.choose(renderer, files)
        if chosen is not None:
            return cls.of_renderer(chosen, files.special_tokens)
        template = cls(files.templates, files.special_tokens, worker=worker)
        if not template:
            _LOG.warning("the model has no chat template, so chats are refused; --chat-template FILE gives it one")
        for name in files.templates:
            try:
                template._compile(name)
            except (InvalidRequest, TextFailed) as error:
                _LOG.warning(
                    "a chat template of the model cannot be used; --chat-template FILE replaces it",
                    extra={"template": name, "reason": str(error)},
                )
        return template

    @classmethod
    def of_renderer(cls, renderer: Renderer, variables: Mapping[str, str] | None = None) -> ChatTemplate:
        """Return the chat template of a family whose prompts are defined by code. variables: see the constructor."""
        template = cls({"default": renderer.source}, variables)
        template._compiled["default"] = renderer
        return template

    @classmethod
    def of_file(
        cls, file: str | Path, variables: Mapping[str, str] | None = None, worker: Worker | None = None
    ) -> ChatTemplate:
        """Compile the template in `file`. Raises ConfigError."""
        try:
            template = cls({"default": Path(file).read_text(encoding="utf-8")}, variables, worker=worker)
            template._compile("default")
        except OSError as error:
            raise ConfigError(f"chat template {file}: {error.strerror}") from error
        except (UnicodeDecodeError, InvalidRequest, TextFailed) as error:
            raise ConfigError(f"chat template {file}: {error}") from error
        return template

    def __bool__(self) -> bool:
        """Return whether the model has a template."""
        return bool(self._sources)

    @property
    def source(self) -> str | None:
        """The source of the template named "default"; None if the model has no such template."""
        return self._sources.get("default")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
    ) -> str:
        """Return the prompt's text, special tokens included, so that encoding must not add special tokens.

        messages  plain JSON values; content is text or a list of parts
        kwargs    further variables for the template; variables that the template does not read are ignored
        limits    limits of this rendering; None: the constructor's `limits`

        Raises InvalidRequest if the template is missing, refuses the conversation or fails, or if `kwargs` set a
        reserved variable; TooCostly at a limit; TextFailed if the worker process fails.
        """
        if not messages:
            raise InvalidRequest("the conversation is empty", param="messages")
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        name = self._choose(tools)
        compiled = self._compile(name)
        conversation = [_prepared(message, text_arguments=compiled.text_arguments) for message in messages]
        if any(map(_only_calls, conversation)):
            content = self._beside_calls(name, compiled)
            conversation = [{**each, **content} if _only_calls(each) else each for each in conversation]
        if any(isinstance(message.get("content"), list) for message in conversation) and not compiled.reads_parts:
            conversation = [_with_joined_parts(message) for message in conversation]
        final = ""
        if continue_final_message:
            conversation[-1], final = _marked(conversation[-1])
        text = compiled.render(
            self._variables
            | self._functions(compiled, tools)
            | _allowed(kwargs or {}, compiled.reads, reserved=self._variables)
            | {
                "messages": conversation,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
            },
            limits or self._limits,
        )
        return _cut_at_mark(text, final) if continue_final_message else text

    def _functions(self, compiled: Template, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return `functions` and `datetime` for templates that read these instead of `tools` (Firefunction)."""
        if "functions" not in compiled.reads or "tools" in compiled.reads:
            return {}
        functions = [tool["function"] for tool in tools or () if "function" in tool]
        return {
            "functions": json.dumps(functions, ensure_ascii=False, indent=4),
            "datetime": self._now().astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S %p %Z"),
        }

    def _beside_calls(self, name: str, compiled: Template) -> Message:
        """Return the field `content` with which a template renders calls: absent, empty or null."""
        if name not in self._contents:
            arguments = "{}" if compiled.text_arguments else {}
            forms: tuple[Message, ...] = ({}, {"content": ""}, {"content": None})
            printed = (form for form in forms if _CALL_NAME in _printed(compiled, arguments, form))
            self._contents[name] = next(printed, {})
        return self._contents[name]

    def mentions(self, text: str) -> bool:
        """Return whether any template's source contains `text`."""
        return any(text in source for source in self._sources.values())

    @property
    def apart(self) -> bool:
        """Whether rendering may wait for the worker process, so that the event loop's thread must not render."""
        if self._worker is None:
            return False
        compiled = (dialects.original(self._compiled.get(name)) for name in self._sources)
        return any(isinstance(template, ApartTemplate | None) for template in compiled)

    def reads(self, variable: str, *, tools: bool = False) -> bool:
        """Return whether the template reads a variable.

        tools  whether to look at the template for conversations with tools
        """
        try:
            return variable in self._compile(self._choose([] if tools else None)).reads
        except InvalidRequest:
            return False

    def opening(self, *, tools: bool = False) -> str:
        """Return the prompt of a short question; empty if the template cannot render the question."""
        return self._probe({}, tools=tools) or ""

    def accepts(self, kwargs: Mapping[str, Any], *, tools: bool = False) -> bool:
        """Return False if the template renders a short question without `kwargs` but fails with them."""
        return self._probe(kwargs, tools=tools) is not None or self._probe({}, tools=tools) is None

    def _probe(self, kwargs: Mapping[str, Any], *, tools: bool) -> str | None:
        """Return the prompt of a short question; None if the template fails.

        All results are cached, because callers pass only a few different `kwargs`.
        """
        key = tools, *sorted(kwargs.items())
        if key not in self._probed:
            messages: list[Message] = [{"role": "user", "content": _PROBE}]
            try:
                self._probed[key] = self.render(
                    messages, tools=_PROBE_TOOLS if tools else None, kwargs=kwargs, limits=PROBING
                )
            except InvalidRequest:
                self._probed[key] = None
        return self._probed[key]

    def begins_with_bos(self, text: str) -> bool:
        """Return whether a text begins with the BOS token, so that encoding must not add a second BOS token."""
        bos = self._variables.get("bos_token")
        return bool(bos) and text.startswith(bos or "")

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> str:
        if tools is not None and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if self._sources:
            raise InvalidRequest(
                f"this model has chat templates named {', '.join(sorted(self._sources))} but no default; "
                "start infd with one of them as --chat-template FILE",
                param="messages",
            )
        raise InvalidRequest("this model has no chat template; start infd with --chat-template FILE", param="messages")

    def _compile(self, name: str) -> Template:
        # No lock: if two threads compile the same template at once, their results are interchangeable.
        compiled = self._compiled.get(name)
        if compiled is None:
            try:
                compiled = self._compile_source(name)
            except InvalidRequest as error:
                compiled = without_frames(error)
            self._compiled[name] = compiled
        if isinstance(compiled, InvalidRequest):
            raise InvalidRequest(str(compiled), param=compiled.param)
        return compiled

    def _compile_source(self, name: str) -> Template:
        source = self._sources[name]
        if self._worker is not None and (objection := _objection(source)) is not None:
            self._worker.reasons[f"chat template {name!r}"] = objection
            _LOG.warning(
                "a chat template runs in a process of its own, which is slower: infd cannot bound its cost",
                extra={"template": name, "reason": objection},
            )
            return dialects.translated(source, ApartTemplate(self._worker, source))
        return dialects.translated(source, Compiled(source, self._now))


@cache
def _parser() -> Sandbox:
    return Sandbox()


def _objection(source: str) -> str | None:
    """Return the reason why a template may not run in this process, or None."""
    if len(source) > vetting.templates.LONGEST:
        return f"it is longer than {vetting.templates.LONGEST} characters"
    try:
        return vetting.templates.objection(_parser().parse(source))
    except TemplateSyntaxError:
        return None  # the compilation reports the error
    except Exception as error:
        return f"it cannot be parsed: {_short(error)}"


class Compiled:
    """A template compiled in this process."""

    def __init__(self, source: str, now: Callable[[], datetime] = datetime.now) -> None:
        """Compile `source`. Raises InvalidRequest for a source that is too long or does not compile."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise InvalidRequest(f"the chat template is longer than {MAX_SOURCE_CHARACTERS} characters")
        self._sandbox = Sandbox()
        self._sandbox.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self.reads = frozenset(meta.find_undeclared_variables(self._sandbox.parse(source)))
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidRequest(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
        except Exception as error:  # an untrusted source may make the compiler raise any exception
            raise InvalidRequest(f"the chat template cannot be compiled: {_short(error)}") from error
        self.reads_parts = self._probe_parts()
        self.text_arguments = "tool_calls" in source and self._probe_arguments()

    def render(self, variables: Mapping[str, Any], limits: Limits) -> str:
        try:
            return "".join(self._sandbox.run(self._template, variables, limits))
        except Exhausted as error:
            raise TooCostly(f"chat template: {error}", param="messages") from error
        except Exception as error:  # the template's code may raise any exception, depending on a client's values
            raise InvalidRequest(f"chat template: {_short(error)}", param="messages") from error

    def _probe_parts(self) -> bool:
        """Return whether content may be a list of parts, see Template."""
        content = [{"type": "text", "text": _PROBE}]
        variables = {"messages": [{"role": "user", "content": content}], "add_generation_prompt": False, **_NO_TOKENS}
        try:
            text = self.render(variables, PROBING)
        except InvalidRequest:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _probe_arguments(self) -> bool:
        """Return whether a call's arguments must be JSON text, see Template."""
        for content in ({"content": ""}, {"content": None}):
            of_object = _printed(self, {"infd_key": 1}, content)
            if "infd_key" in of_object and "'infd_key'" not in of_object:
                return False
            if '"infd_key"' in _printed(self, '{"infd_key": 1}', content):
                return True
        return False


def _printed(template: Template, arguments: Any, content: Message) -> str:
    """Render a conversation whose last message has a call with `arguments`; return "" if the template fails."""
    function = {"name": _CALL_NAME, "arguments": arguments}
    calls = [{"id": _CALL_ID, "type": "function", "function": function}]
    messages = [{"role": "user", "content": _PROBE}, {"role": "assistant", **content, "tool_calls": calls}]
    variables = {"messages": messages, "tools": None, "add_generation_prompt": False, **_NO_TOKENS}
    try:
        return template.render(variables, PROBING)
    except InvalidRequest:
        return ""


def _allowed(kwargs: Mapping[str, Any], read: AbstractSet[str], reserved: Mapping[str, str]) -> dict[str, Any]:
    """Return the kwargs that the template reads. Raises InvalidRequest for a name that requests may not set."""
    own = {"messages", "tools", "documents", "add_generation_prompt", *reserved, "strftime_now", *_parser().globals}
    for name in kwargs:
        if name in own:
            raise InvalidRequest(f"a request cannot set {name}", param=f"chat_template_kwargs.{name}")
    return {name: value for name, value in kwargs.items() if name in read}


def _short(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 500 else text[:500] + "..."


def _only_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) and not message.get("content")


def _prepared(message: Message, *, text_arguments: bool) -> Message:
    """Return a message as templates expect it.

    Null fields are dropped. A call's arguments become an object, or JSON text if `text_arguments`. Reasoning is stored
    under the names `thinking` and `reasoning_content`.
    """
    message = {name: value for name, value in message.items() if value is not None}
    if isinstance(calls := message.get("tool_calls"), list):
        message["tool_calls"] = [
            _with_written_arguments(call) if text_arguments else _with_parsed_arguments(call) for call in calls
        ]
    for field in _REASONING_FIELDS:
        if field in message:
            return {"thinking": message[field], **message, "reasoning_content": message[field]}
    return message


def _with_parsed_arguments(call: Any) -> Any:
    """Return a call with its arguments parsed from the JSON text that clients send; unchanged if they are not JSON."""
    match call:
        case {"function": {"arguments": str(text)} as function}:
            try:
                arguments = json.loads(text) if text else {}
            except (ValueError, RecursionError):
                return call  # the model wrote arguments that are not JSON
            return {**call, "function": {**function, "arguments": arguments}}
    return call


def _with_written_arguments(call: Any) -> Any:
    """Return a call with its arguments as JSON text."""
    match call:
        case {"function": {"arguments": dict(arguments)} as function}:
            text = json.dumps(arguments, ensure_ascii=False)
            return {**call, "function": {**function, "arguments": text}}
    return call


def _with_joined_parts(message: Message) -> Message:
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def _marked(message: Message) -> tuple[Message, str]:
    """Return the message with an end mark after its text, and the text without the mark."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + _END_MARK}, content
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                ending = {**part, "text": part["text"] + _END_MARK}
                return {**message, "content": [*content[:index], ending, *content[index + 1 :]]}, part["text"]
    raise InvalidRequest("the final message has no text to continue", param="messages")


def _cut_at_mark(text: str, final: str) -> str:
    end = text.rfind(_END_MARK.rstrip())
    if end < 0 or final.strip() not in text:
        raise InvalidRequest(
            "this model's chat template leaves out or changes the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()
