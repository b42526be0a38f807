"""The program of the worker process, which runs the tasks of `apart.py`: `python -m infd.text.worker`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infd.apart.child import serve
from infd.text import apart
from infd.text.chat import Compiled
from infd.text.conversion import convert
from infd.text.tokenizer import Library

if TYPE_CHECKING:
    from infd.text.apart import Task

_MOST_TEMPLATES = 16


class Tasks:
    """The functions that run tasks, and the cached tokenizer and compiled templates."""

    def __init__(self) -> None:
        self._tokenizer: Library | None = None
        self._templates: dict[str, Compiled] = {}

    def do(self, task: Task) -> Any:
        match task:
            case apart.LoadTokenizer(content, additions):
                self._tokenizer = Library.load(content, additions)
                return apart.Loaded(self._tokenizer.vocabulary, self._tokenizer.tokens())
            case apart.Encode(text, add_special_tokens):
                assert self._tokenizer is not None
                return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
            case apart.EncodePassages(passages, cut, add_special_tokens):
                assert self._tokenizer is not None
                return self._tokenizer.encode_passages(passages, cut, add_special_tokens=add_special_tokens)
            case apart.ConvertTokenizer(directory):
                return convert(Path(directory))
            case apart.CompileTemplate(source):
                template = self._template(source)
                return apart.TemplateProperties(template.reads, template.reads_parts, template.text_arguments)
            case apart.RenderTemplate(source, variables, limits):
                return self._template(source).render(variables, limits)

    def _template(self, source: str) -> Compiled:
        if source not in self._templates:
            if len(self._templates) == _MOST_TEMPLATES:
                self._templates.clear()
            self._templates[source] = Compiled(source)
        return self._templates[source]


def main() -> None:
    # The library uses one thread, because each of its threads would reserve memory for an arena of the allocator.
    os.environ["RAYON_NUM_THREADS"] = "1"
    serve(apart.Task, Tasks().do)


if __name__ == "__main__":
    main()
