"""The protocol of chat templates, whatever defines them: source that is compiled, a worker process, a family's code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from infd.text.fuel import Limits


class Template(Protocol):
    """A compiled template.

    reads           names of the variables that the template reads
    reads_parts     whether content may be a list of parts; if not, the template fails, or prints the list in Python's
                    or JSON's syntax
    text_arguments  whether a call's arguments must be JSON text; if so, the template fails on an object, or prints the
                    object in Python's syntax
    """

    @property
    def reads(self) -> AbstractSet[str]: ...
    @property
    def reads_parts(self) -> bool: ...
    @property
    def text_arguments(self) -> bool: ...
    def render(self, variables: Mapping[str, Any], limits: Limits) -> str: ...
