"""vLLM's flags: the setting of infd for each, or the reason why infd has none (vllm.toml)."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

TABLE: Final = Path(__file__).with_name("vllm.toml")


class Refused(Struct, frozen=True, forbid_unknown_fields=True):
    """Flags that infd lacks, for one reason."""

    reason: str
    flags: tuple[str, ...]


class Flags(Struct, frozen=True, forbid_unknown_fields=True):
    """All flags of one of vLLM's commands.

    taken    flags that infd has under the same name
    aliases  flag -> infd's flag, which infd takes in its place with the same values
    ours     flag -> infd's flag, setting or command instead of it
    refused  all others
    short    short form -> flag
    """

    taken: tuple[str, ...]
    ours: dict[str, str]
    refused: tuple[Refused, ...]
    aliases: dict[str, str] = {}
    short: dict[str, str] = {}


def flags(command: Literal["serve", "bench"]) -> Flags:
    """Return the flags of `vllm serve` or of `vllm bench serve`."""
    return msgspec.convert(tomllib.loads(TABLE.read_text(encoding="utf-8"))[command], Flags)


def instead(option: str, command: Literal["serve", "bench"] = "serve") -> str | None:
    """Return a sentence about an option of vLLM's that infd's command lacks; None: vLLM lacks the option too.

    vLLM accepts underscores for hyphens, and --no-NAME for a switch.
    """
    known, option = flags(command), option.replace("_", "-")
    whole = known.short.get(option, option)
    if whole in known.taken:
        return f"{option} is vLLM's; in infd: {whole}"
    for flag in (whole, "--" + whole.removeprefix("--no-")):
        if flag in known.ours:
            return f"{option} is vLLM's; in infd: {known.ours[flag]}"
        for refused in known.refused:
            if flag in refused.flags:
                return f"{option} is vLLM's, and infd lacks it: {refused.reason}"
    return None
