"""The settings of the tree as a flat mapping, for flags, the man page, `config show` and the loader."""

from __future__ import annotations

from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

from infd.config.tree import Config

if TYPE_CHECKING:
    from collections.abc import Iterator


class Setting(Struct, frozen=True):
    """One setting.

    key       section.name
    type      annotation, bounds included
    default   built-in value
    help      description, one line
    flag      command-line option for this setting; None: none; a --no- flag accepts no value and disables the setting
    alias     another name of that option; None: none
    accepted  accepted values, for help; None: derived from the type
    live      whether a reload changes it in a running daemon
    """

    key: str
    type: Any
    default: object
    help: str
    flag: str | None
    alias: str | None
    accepted: str | None
    live: bool

    @property
    def sentence(self) -> str:
        return f"{self.help[0].upper()}{self.help[1:]}."

    @property
    def repeatable(self) -> bool:
        """Whether the flag may be repeated: the setting is a list or a table."""
        return isinstance(self.default, (tuple, dict))

    @property
    def mapping(self) -> bool:
        """Whether the setting is a table, written NAME=VALUE outside TOML."""
        return isinstance(self.default, dict)

    @property
    def switch(self) -> bool:
        """Whether the flag is a --no- flag without a value."""
        return self.flag is not None and self.flag.startswith("--no-")

    @property
    def sized(self) -> bool:
        """Whether values may include a unit, as in 512M."""
        return self.key.endswith("bytes")

    @property
    def default_text(self) -> str:
        """The built-in value as text; empty for None and for tables."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        if self.mapping:
            return ""
        if isinstance(self.default, tuple):
            return ", ".join(map(str, self.default))
        return "" if self.default is None else str(self.default)

    @property
    def values(self) -> str:
        """Accepted values for help, such as `auto|cpu|cuda|null`, `NUMBER`, `SIZE`, `TEXT`."""
        if self.accepted is not None:
            return self.accepted
        kind = _bare(self.type)
        if get_origin(kind) is Literal:
            return "|".join(get_args(kind))
        if kind is bool:
            return "true|false"
        if self.sized:
            return "SIZE"
        if self.mapping:
            return "NAME=TEXT"
        return "NUMBER" if kind in (int, float) else "TEXT"

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that can be listed, those of `values` in small letters; empty: there are none."""
        parts = self.values.split("|")
        return tuple(part for part in parts if part.islower()) if len(parts) > 1 else ()


def _bare(type_: Any) -> Any:
    """Return a type without the metadata of Annotated and without `None`."""
    while True:
        if hasattr(type_, "__metadata__"):
            type_ = type_.__origin__
        elif get_origin(type_) in (Union, UnionType):
            (type_,) = (option for option in get_args(type_) if option is not type(None))
        else:
            return type_


def _settings() -> Iterator[Setting]:
    for section, struct in get_type_hints(Config).items():
        for field in msgspec.structs.fields(struct):
            meta = [note for note in field.type.__metadata__ if note.description is not None][-1]
            key = f"{section}.{field.name}"
            default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            extra = meta.extra
            yield Setting(
                key,
                field.type,
                default,
                meta.description,
                extra["flag"],
                extra["alias"],
                extra["values"],
                extra["live"],
            )


SETTINGS = MappingProxyType({setting.key: setting for setting in _settings()})
