"""Change live settings of a running daemon: read all settings again, or set some until the next reload.

Settings are read and checked whole before the first of them changes. Settings that take effect only at a start keep
their values, and are reported with the old and the new value.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from infd.admin import protocol
from infd.config import SETTINGS, Assignment, Loaded
from infd.daemon import resolve
from infd.errors import ConfigError
from infd.http.proxies import networks
from infd.http.rates import tenants
from infd.sockets import tls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
    from ssl import SSLContext

    from infd.config import Config, Environment, LiveConfig
    from infd.http.auth import Key, Keys
    from infd.offload import Offload
    from infd.telemetry.events import Events

log = logging.getLogger("infd.daemon")

SET = "infdctl config set"


class Replacement(Struct, frozen=True):
    """Settings, and the files that they name, as read at a start or reload."""

    config: Config
    keys: Keys
    tls: SSLContext | None

    @classmethod
    def read(cls, config: Config, environment: Environment) -> Self:
        """Read the files. Raises ConfigError."""
        networks(config.server.trusted_proxies)
        tenants(config.quotas)
        return cls(config, resolve.keys(config, environment), tls.context(config.server))

    def doubts(self) -> list[str]:
        """Return a line for each tenant in quotas.tenants to which no API key belongs."""
        owners = {key.tenant for key in self.keys}
        idle = [tenant for tenant in self.config.quotas.tenants if tenant not in owners]
        return [f"quotas.tenants: no API key belongs to tenant {tenant!r}" for tenant in idle]


class Reloader:
    """The live settings, and the values that `infdctl config set` gave them since the last reload."""

    def __init__(
        self,
        live: LiveConfig,
        start: Loaded | None,
        environment: Environment,
        offload: Offload,
        events: Events,
        apply: Callable[[Replacement], Awaitable[None]],
        keys: Iterable[Key] = (),
    ) -> None:
        """Take the settings of the start.

        start  settings of the start, with their sources; None: settings that a program chose, which never change
        apply  puts a replacement in force, once it is known to be valid
        keys   API keys of the start
        """
        self._live = live
        self._sources = None if start is None else start.sources
        self._environment = environment
        self._offload = offload
        self._events = events
        self._apply = apply
        self._keys = tuple(keys)
        self._set: dict[str, Assignment] = {}
        self._waiting: dict[str, Any] = {}  # values of the next start that differ from those in force
        self._origins: Mapping[str, str] = {} if start is None else start.origins
        self._one_at_a_time = asyncio.Lock()

    async def reload(self) -> protocol.Reloaded:
        """Read all settings and the API keys again. Raises ConfigError, which leaves everything as it was."""
        async with self._one_at_a_time:
            undone = sorted(self._set)
            try:
                done = await self._change({})
            except ConfigError as error:
                for line in str(error).splitlines():
                    log.warning("not reloaded: %s", line)
                self._events.publish("config", "not reloaded", error=str(error))
                raise
            done.undone = [key for key in undone if key in {change.key for change in done.applied}]
            fields = {"applied": len(done.applied), "restart": len(done.restart), "keys": done.keys}
            self._events.publish("config", "reloaded", **fields)
            log.info("reloaded", extra=fields)
            for change in done.applied:
                log.info("setting changed", extra=msgspec.structs.asdict(change))
            for change in done.restart:
                log.warning("this setting changes at the next start only", extra=msgspec.structs.asdict(change))
            for key in done.undone:
                log.warning("the reload replaced a value of `%s`", SET, extra={"key": key})
            return done

    async def set(self, values: Mapping[str, str]) -> protocol.Reloaded:
        """Give live settings other values, as texts, until the next reload or start. Raises ConfigError."""
        async with self._one_at_a_time:
            if fixed := [key for key in values if key in SETTINGS and not SETTINGS[key].live]:
                raise ConfigError(f"{', '.join(fixed)}: changes at a start only; set it in a file, and restart infd")
            assigned = {key: Assignment(key, value, SET) for key, value in values.items()}
            try:
                done = await self._change(self._set | assigned, only=assigned)
            except ConfigError as error:  # the operator has just typed the command
                raise ConfigError("\n".join(line.removeprefix(f"{SET}: ") for line in str(error).split("\n"))) from None
            for change in done.applied:
                log.info("setting changed", extra=msgspec.structs.asdict(change))
                self._events.publish("config", "set", key=change.key, old=change.old, new=change.new)
            return done

    def close(self) -> None:
        """Log the values of `set`, which end with the daemon."""
        for key in sorted(self._set):
            ends = "a value of `%s` ends with this daemon: a start reads files, variables and flags"
            log.warning(ends, SET, extra={"key": key, "value": self._live.now.value(key)})

    def rows(self) -> list[protocol.SettingRow]:
        """Return all settings with their values and origins."""
        now, waiting = self._live.now, self._waiting
        return [
            protocol.SettingRow(
                key, now.value(key), self._origins.get(key, ""), setting.live, waiting.get(key, msgspec.UNSET)
            )
            for key, setting in SETTINGS.items()
        ]

    def waiting(self) -> list[protocol.SettingChange]:
        """Return the settings whose new value, found when settings were last read, takes effect at the next start."""
        return [protocol.SettingChange(key, self._live.now.value(key), new) for key, new in self._waiting.items()]

    async def _change(
        self, assigned: dict[str, Assignment], only: Collection[str] = SETTINGS.keys()
    ) -> protocol.Reloaded:
        """Read the settings with `assigned` on top; apply and report changes of the settings `only`."""
        if self._sources is None:
            raise ConfigError("this daemon's settings come from a program, not from files: there is nothing to reload")
        loaded = await self._offload(self._sources.load, *assigned.values())
        now = self._live.now
        changed = [key for key in only if key in SETTINGS and loaded.config.value(key) != now.value(key)]
        applied = [key for key in changed if SETTINGS[key].live]
        config = _merged(now, loaded, applied)
        replacement = await self._offload(Replacement.read, config, self._environment)
        before = {key.name: key for key in self._keys}
        after = {key.name: key for key in replacement.keys}
        await self._apply(replacement)
        doubts = replacement.doubts()
        for doubt in doubts:
            log.warning("%s", doubt)
        self._set, self._keys = assigned, tuple(replacement.keys)
        fixed = (key for key, setting in SETTINGS.items() if not setting.live)
        self._waiting = {key: loaded.config.value(key) for key in fixed if loaded.config.value(key) != now.value(key)}
        self._origins = {**self._origins, **{key: loaded.origins[key] for key in only if SETTINGS[key].live}}
        changes = {key: protocol.SettingChange(key, now.value(key), loaded.config.value(key)) for key in changed}
        return protocol.Reloaded(
            applied=[changes[key] for key in applied],
            restart=[changes[key] for key in changed if not SETTINGS[key].live],
            keys=len(replacement.keys),
            keys_added=len(after.keys() - before.keys()),
            keys_removed=len(before.keys() - after.keys()),
            keys_changed=sum(before[name] != after[name] for name in before.keys() & after.keys()),
            certificate=replacement.tls is not None,
            doubts=doubts,
        )


def _merged(config: Config, loaded: Loaded, keys: Iterable[str]) -> Config:
    """Return `config` with the values that `keys` have in `loaded`."""
    sections: dict[str, dict[str, Any]] = {}
    for key in keys:
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = loaded.config.value(key)
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in sections.items()})
