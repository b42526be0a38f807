"""Record calls as other programs write them: `python -m tests.text.record_calls DIRECTORY`.

DIRECTORY has the unpacked wheels of ms-swift 4.6.0 and paddleformers 1.2.0 (both Apache-2.0). Their classes that write
calls are executed without the packages' other modules, which need gigabytes. ERNIE's class is by its makers.
"""

from __future__ import annotations

import ast
import json
import lzma
import random
import sys
import typing
from pathlib import Path
from typing import Any

from tests.text.test_tool_syntaxes import drawn

WRITTEN = Path(__file__).with_name("written_calls.json.xz")
SWIFT, PADDLE = "swift/agent_template", "paddleformers/datasets/template/tool_utils.py"
COUNT = 200

Calls = list[tuple[str, dict[str, Any]]]


def defined(file: Path, *names: str) -> dict[str, Any]:
    """Execute the definitions of these names in a file; return its global names."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [each for each in tree.body if getattr(each, "name", "") in names]
    found: dict[str, Any] = vars(typing) | {
        "json": json,
        "Function": None,
        "Prompt": list,
        "override": lambda each: each,
    }
    found |= {"BaseAgentTemplate": Base, "ToolUtils": object, "FunctionCall": tuple}
    exec(compile(tree, str(file), "exec"), found)
    return found


class Base:
    """Stands for the package's base class, which parses the calls that are written."""

    def _parse_tool_call(self, content: Any) -> Any:
        return content

    def _format_tool_calls(self, messages: Any) -> str:
        raise NotImplementedError

    def written(self, contents: list[dict[str, Any]]) -> str:
        return self._format_tool_calls(contents)


def swift(file: Path, name: str) -> Any:
    template: Base = defined(file, name, "_to_json", "_encode_arguments_to_dsml")[name]()

    def write(calls: Calls) -> str:
        contents = [{"content": {"name": name, "arguments": _json(arguments)}} for name, arguments in calls]
        return template.written(contents)

    return write


def paddle(file: Path) -> Any:
    tools = defined(file, "ERNIEToolUtils")["ERNIEToolUtils"]
    return lambda calls: tools.function_formatter([(name, _json(arguments)) for name, arguments in calls])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def main() -> None:
    packages, draw = Path(sys.argv[1]), random.Random(19)
    writers = {
        "glm4": swift(packages / SWIFT / "glm4.py", "ChatGLM4AgentTemplate"),
        "deepseek_v41": swift(packages / SWIFT / "deepseek_v41.py", "DeepSeekV41AgentTemplate"),
        "ernie45": paddle(packages / PADDLE),
    }
    recorded: dict[str, list[tuple[Calls, str]]] = {name: [] for name in writers}
    for _ in range(COUNT):
        calls = [
            (
                draw.choice(["weather", "get_all", "f-2"]),
                {key: drawn(draw) for key in draw.sample(["city", "days", "a_b", "x"], draw.randrange(4))},
            )
            for _ in range(draw.randrange(1, 4))
        ]
        for name, write in writers.items():
            recorded[name].append((calls, write(calls)))
    WRITTEN.write_bytes(lzma.compress(json.dumps(recorded).encode(), preset=9))


if __name__ == "__main__":
    main()
