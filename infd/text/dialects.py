"""Chat templates that read calls, results and tools in fields of their own instead of those of OpenAI's API: GLM-4's.

GLM-4 and GLM-4-0414 read each call as a message of its own, with the tool's name in `metadata` and the arguments as
content, and each result as a message of the role "observation". GLM-4 reads the tools from a message too. Without this
module, a client's calls and results would be missing from the prompt.

Source: the checkpoints' templates; for several calls in one message, agent_template/glm4.py of ms-swift 4.6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from infd.text.fuel import Limits
    from infd.text.template import Template

_MARKS: Final = "[gMASK]<sop>"  # begins every prompt of GLM-4
_TOOLS: Final = "item['tools']"


def translated(source: str, template: Template) -> Template:
    """Return a template that reads messages and tools of OpenAI's API. source: of `template`."""
    glm4 = _MARKS in source and "metadata" in source and "tool_calls" not in source
    return Glm4(template, tools_in_message=_TOOLS in source) if glm4 else template


def original(template: Any) -> Any:
    """Return the template as the checkpoint has it."""
    return template.template if isinstance(template, Glm4) else template


class Glm4:
    """See Template."""

    text_arguments = True  # written as the model wrote them

    def __init__(self, template: Template, *, tools_in_message: bool) -> None:
        """tools_in_message: whether the template reads tools from a message."""
        self.template = template
        self.reads: AbstractSet[str] = template.reads | {"tools"}
        self.reads_parts = template.reads_parts
        self._tools_in_message = tools_in_message

    def render(self, variables: Mapping[str, Any], limits: Limits) -> str:
        messages = [each for message in variables["messages"] for each in _messages(message)]
        if self._tools_in_message and variables.get("tools"):
            messages.insert(0, {"role": "system", "content": "", "tools": variables["tools"]})
        return self.template.render({**variables, "messages": messages}, limits)


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the messages that the template reads instead of one message."""
    if message.get("role") == "tool":
        yield {**message, "role": "observation"}
        return
    calls: Sequence[Any] = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        yield {name: value for name, value in message.items() if name != "tool_calls"}
    for call in calls:
        function = call["function"]
        yield {"role": "assistant", "metadata": function["name"], "content": function.get("arguments") or "{}"}
