"""Settings in force, and changes of settings."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType


class SettingChange(Struct):
    key: str
    old: Any
    new: Any


class SettingRow(Struct):
    """A setting in force.

    origin   where the value comes from: built-in, a file, a variable, a flag, or `infdctl config set`
    live     whether it can change while the daemon runs
    restart  the value of the next start, if the last reload found another one; absent if not
    """

    key: str
    value: Any
    origin: str
    live: bool
    restart: Any | UnsetType = UNSET


class Settings(Struct):
    settings: list[SettingRow]


class ServerInfo(Struct):
    """Version, model, settings and facts of the daemon: vLLM's /server_info.

    config  settings in force, by section
    facts   the device's facts: kernels, sizes, times
    """

    version: str
    model: str
    config: dict[str, dict[str, Any]]
    facts: dict[str, Any]


class SetSettings(Struct, forbid_unknown_fields=True):
    """Give live settings other values, until the next reload or start.

    values  texts, as after `infd start --set KEY=`
    """

    values: Annotated[dict[str, str], Meta(min_length=1)]


class Reloaded(Struct):
    """Settings and API keys after a change.

    applied  settings that changed
    restart  settings with another value in their source, which takes effect at the next start
    keys     number of API keys in force; of them `keys_added` and `keys_changed` (another hash, tenant or limit)
    keys_removed  number of keys that are accepted no longer
    undone   settings among `applied` whose value of `infdctl config set` the reload replaced
    certificate  whether a certificate was read again; later handshakes present it
    doubts   likely mistakes in the settings in force, in words
    """

    applied: list[SettingChange]
    restart: list[SettingChange]
    keys: int
    undone: list[str] = []
    certificate: bool = False
    doubts: list[str] = []
    keys_added: int = 0
    keys_removed: int = 0
    keys_changed: int = 0
