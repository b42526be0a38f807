"""The command line of `infdctl bench`: vLLM's names of its options, options with several values, types of values."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.config.vllm import Flags

SEVERAL: Final = ("--goodput", "--header", "--metadata", "--lora-modules")
"""Options that take all values up to the next option."""

_TASKS: Final = {
    "/v1/embeddings": "embed",
    "/pooling": "embed",
    "/classify": "classify",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""Tasks by the paths that vLLM's --endpoint gives for them."""

POSITIVE: Final = click.FloatRange(min=0, min_open=True)


class BenchCommand(click.Command):
    """A command that accepts vLLM's option names. The error for one that it lacks names the option to use instead.

    config/vllm.toml lists the names.
    """

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        from infd.config.vllm import flags, instead

        try:
            return super().parse_args(context, _separate(_renamed(arguments, flags("bench"))))
        except click.NoSuchOption as error:
            advice = instead(error.option_name, "bench")
            if advice is None:
                raise
            raise click.UsageError(advice, context) from None


def _renamed(arguments: list[str], known: Flags) -> list[str]:
    """Replace vLLM's names by ours. vLLM accepts underscores for hyphens."""
    named = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        flag = name.replace("_", "-")
        ours = known.aliases.get(flag, flag if flag in known.taken else name)
        named.append(f"{ours}{equals}{value}" if name.startswith("--") else argument)
    return named


def _separate(arguments: list[str]) -> list[str]:
    """Repeat an option of SEVERAL before each of its values."""
    separate: list[str] = []
    option, first = "", False
    for argument in arguments:
        if argument.startswith("-"):
            option, first = (argument, True) if argument in SEVERAL else ("", False)
            separate.append(argument)
        else:
            separate += [argument] if first or not option else [option, argument]
            first = False
    return separate


class Several(click.ParamType):  # type: ignore[type-arg]
    """Numbers with commas between them, such as 1,2,4,8; `inf` is no limit, None."""

    name = "list"

    def __init__(self, number: click.ParamType[Any]) -> None:
        self._number = number

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> list[Any]:
        if isinstance(value, list):
            return value
        parts = (part.strip() for part in value.split(","))
        return [None if part == "inf" else self._number.convert(part, parameter, context) for part in parts]


class Parsed(click.ParamType):  # type: ignore[type-arg]
    """A value that a function reads; its ValueError is the message.

    listed  returns the values that a shell can complete
    """

    def __init__(self, name: str, read: Callable[[str], Any], listed: Callable[[], Sequence[str]] = tuple) -> None:
        self.name = name
        self._read = read
        self._listed = listed

    def shell_complete(
        self, context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(value) for value in self._listed() if value.startswith(incomplete)]

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), parameter, context)


def objective(text: str) -> tuple[str, float]:
    from infd.loadgen.goodput import parse

    return parse(text)


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{text!r} is not NAME=VALUE")
    return name.strip(), value.strip()


def weighted(text: str) -> tuple[str, float]:
    """Read NAME or NAME=WEIGHT."""
    name, equals, value = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 0 < weight < math.inf or not name:
        raise ValueError(f"{text!r} is not NAME or NAME=WEIGHT with a weight above 0")
    return name, weight


def json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("not a JSON object")
    return found


def ranges(text: str) -> tuple[float, float]:
    """Read one range ratio for prompts and answers, or {"input": ..., "output": ...}."""
    if text.lstrip().startswith("{"):
        found = json_object(text)
        if set(found) - {"input", "output"}:
            raise ValueError("its keys are input and output")
        both = (found.get("input", 0.0), found.get("output", 0.0))
    else:
        try:
            both = (float(text), float(text))
        except ValueError:
            raise ValueError(f"{text!r} is no number") from None
    if not all(isinstance(ratio, int | float) and 0 <= ratio < 1 for ratio in both):
        raise ValueError("a range ratio is at least 0 and below 1")
    return both


def endpoint(text: str) -> str:
    """Read chat, completions, or the path of one of them."""
    known = {"chat": "chat", "/v1/chat/completions": "chat"}
    known |= {"completions": "completions", "/v1/completions": "completions"}
    if text in _TASKS:
        raise ValueError(f"requests to {text} are measured by --task {_TASKS[text]}")
    if text not in known:
        raise ValueError(f"{text!r} is not chat or completions")
    return known[text]


def dataset(text: str) -> str:
    """Read the name of a dataset, ours or vLLM's."""
    if text == "random-rerank":
        raise ValueError("--task rerank measures random queries, each with --inputs documents")
    name = {"prefix_repetition": "shared-prefix", "custom": "prompts"}.get(text, text)
    if name not in datasets():
        raise ValueError(f"{text!r} is not one of {', '.join(datasets())}")
    return name


def datasets() -> tuple[str, ...]:
    """Return the names of all datasets."""
    from typing import get_args

    from infd.loadgen.datasets.spec import Shape

    return ("random", "shared-prefix", *get_args(Shape))
