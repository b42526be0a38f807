"""How a setting is declared: a field of a section, with its bounds and its help.

A field whose name ends in `bytes` accepts a unit: "512M", "2G".
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
# Durations are finite: at most 1e9 s (about 30 years), or 1e9 ms.
Positive = Annotated[float, Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]


def about(
    description: str,
    *,
    flag: str | None = None,
    alias: str | None = None,
    values: str | None = None,
    live: bool = False,
) -> Meta:
    """Describe a setting.

    flag    command-line option for this setting; None: none
    alias   another server's name of that option; None: none
    values  accepted values, for help; None: derived from the type
    live    whether a reload changes it in a running daemon; otherwise a change takes effect at the next start
    """
    return Meta(description=description, extra={"flag": flag, "alias": alias, "values": values, "live": live})


class Section(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the TOML file."""
