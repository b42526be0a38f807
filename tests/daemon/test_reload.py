"""Settings that change while the daemon runs."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec
import pytest

from infd.config import SETTINGS, Environment, LiveConfig, load
from infd.daemon.reload import Reloader, Replacement
from infd.errors import ConfigError
from infd.offload import Offload
from infd.telemetry.events import Events

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from infd.http.auth import Keys


class Server:
    """Settings of a file, and the API keys in force."""

    def __init__(self, directory: Path, text: str = "") -> None:
        self.file = directory / "infd.toml"
        self.file.write_text(text)
        self.offload = Offload()
        start = load(file=self.file)
        self.live = LiveConfig(start.config)
        self.keys: Keys | None = None
        self.reloader = Reloader(self.live, start, Environment(), self.offload, Events(), self._apply)

    async def _apply(self, replacement: Replacement) -> None:
        self.live.now, self.keys = replacement.config, replacement.keys


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path, "[server]\nport = 8000\n")
    yield server
    server.offload.close()


async def test_a_reload_changes_live_settings_and_names_those_that_need_a_restart(server: Server) -> None:
    server.file.write_text('[server]\nport = 9000\nidle_timeout_s = 5\n[log]\nlevel = "debug"\n')

    done = await server.reloader.reload()

    assert [(change.key, change.old, change.new) for change in done.applied] == [
        ("server.idle_timeout_s", 75.0, 5.0),
        ("log.level", "info", "debug"),
    ]
    assert [(change.key, change.old, change.new) for change in done.restart] == [("server.port", 8000, 9000)]
    assert server.live.now.server.idle_timeout_s == 5.0
    assert server.live.now.server.port == 8000


async def test_settings_that_wait_for_a_restart_stay_visible_until_a_reload_takes_them_back(server: Server) -> None:
    def waiting() -> list[tuple[str, object, object]]:
        shown = {row.key: row.restart for row in server.reloader.rows() if row.restart is not msgspec.UNSET}
        changes = [(change.key, change.old, change.new) for change in server.reloader.waiting()]
        assert shown == {key: new for key, _, new in changes}
        return changes

    assert waiting() == []
    server.file.write_text("[server]\nport = 9000\n")
    await server.reloader.reload()
    assert waiting() == [("server.port", 8000, 9000)]
    await server.reloader.set({"limits.choices": "3"})
    assert waiting() == [("server.port", 8000, 9000)]
    server.file.write_text("[server]\nport = 'x'\n")
    with pytest.raises(ConfigError):
        await server.reloader.reload()
    assert waiting() == [("server.port", 8000, 9000)]
    server.file.write_text("[server]\nport = 8000\n")
    await server.reloader.reload()
    assert waiting() == []


async def test_a_reload_without_changes_changes_nothing(server: Server) -> None:
    before = server.live.now
    done = await server.reloader.reload()

    assert (done.applied, done.restart) == ([], [])
    assert server.live.now == before


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[server]\nidle_timeout_s = 0\n", "server.idle_timeout_s"),
        ("[server]\nidel_timeout_s = 5\n", "unknown setting server.idel_timeout_s"),
        ("[server\n", "is not TOML"),
        ('[server]\nidle_timeout_s = 5\napi_key_file = "/nowhere"\n', "/nowhere cannot be read"),
    ],
)
async def test_bad_settings_change_nothing_and_say_why(server: Server, text: str, named: str) -> None:
    before = server.live.now
    server.file.write_text(text)

    with pytest.raises(ConfigError, match=named):
        await server.reloader.reload()

    assert server.live.now is before


async def test_a_key_file_is_read_again_although_no_setting_changed(server: Server, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"a:{sha256(b'one').hexdigest()}\n")
    server.file.write_text(f'[server]\napi_key_file = "{keys}"\n')
    assert (await server.reloader.reload()).keys == 1
    keys.write_text(f"a:{sha256(b'two').hexdigest()}\nb:{sha256(b'three').hexdigest()}\n")

    done = await server.reloader.reload()

    assert (done.applied, done.keys) == ([], 2)
    assert server.keys is not None
    assert server.keys.identify("Bearer two") is not None


async def test_a_tenant_that_no_key_has_is_named(server: Server, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann:{sha256(b'ann').hexdigest()}:alice\n")
    server.file.write_text(f'[server]\nport = 8000\napi_key_file = "{keys}"\n')

    assert (await server.reloader.reload()).doubts == []
    done = await server.reloader.set({"quotas.tenants": '{alice = "share=2", alise = "share=3"}'})
    assert done.doubts == ["quotas.tenants: no API key belongs to tenant 'alise'"]


async def test_a_setting_stays_set_until_the_reload_which_names_it(server: Server) -> None:
    await server.reloader.set({"server.idle_timeout_s": "7"})
    await server.reloader.set({"limits.choices": "3"})
    assert server.live.now.server.idle_timeout_s == 7.0
    assert server.live.now.limits.choices == 3
    origins = {row.key: row.origin for row in server.reloader.rows()}
    assert origins["server.idle_timeout_s"] == "infdctl config set"

    done = await server.reloader.reload()

    assert done.undone == ["limits.choices", "server.idle_timeout_s"]
    assert server.live.now.server.idle_timeout_s == 75.0
    assert {row.key: row.origin for row in server.reloader.rows()}["server.idle_timeout_s"] == "built-in"


async def test_values_that_were_set_end_with_the_daemon_whose_log_names_them(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    await server.reloader.set({"limits.choices": "3"})
    server.reloader.close()

    (line,) = [vars(record) for record in caplog.records if record.levelname == "WARNING"]
    assert (line["message"], line["key"]) == (
        "a value of `infdctl config set` ends with this daemon: a start reads files, variables and flags",
        "limits.choices",
    )


async def test_a_setting_of_the_start_is_not_set(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"server\.port: changes at a start only"):
        await server.reloader.set({"limits.choices": "3", "server.port": "1"})

    assert server.live.now.limits.choices == 128


async def test_setting_one_leaves_edited_files_for_the_reload(server: Server) -> None:
    server.file.write_text("[server]\nidle_timeout_s = 5\n")

    done = await server.reloader.set({"limits.choices": "3"})

    assert [change.key for change in done.applied] == ["limits.choices"]
    assert server.live.now.server.idle_timeout_s == 75.0
    assert [change.key for change in (await server.reloader.reload()).applied] == [
        "server.idle_timeout_s",
        "limits.choices",
    ]


@pytest.mark.parametrize("text", ["[cache]\nbytes = '" + "9" * 400 + "'\n", "[server]\nhost = " + "[" * 5000 + "\n"])
async def test_absurd_values_are_bad_settings(server: Server, text: str) -> None:
    server.file.write_text(text)

    with pytest.raises(ConfigError):
        await server.reloader.reload()


async def test_a_value_that_is_refused_is_not_kept_for_the_next_change(server: Server) -> None:
    with pytest.raises(ConfigError, match=r"limits\.choices"):
        await server.reloader.set({"limits.choices": "0"})
    await server.reloader.set({"limits.stop_strings": "3"})

    assert server.live.now.limits.choices == 128


async def test_changes_at_once_take_turns(server: Server) -> None:
    await asyncio.gather(
        *(server.reloader.set({"limits.choices": str(number)}) for number in range(1, 20)),
        server.reloader.reload(),
        server.reloader.set({"limits.stop_strings": "5"}),
    )

    assert server.live.now.limits.choices == 128  # the reload came after the values that were set
    assert server.live.now.limits.stop_strings == 5


async def _keep(replacement: Replacement) -> None:
    """Change nothing."""


async def test_settings_of_a_program_do_not_change() -> None:
    offload = Offload()
    config = load().config
    reloader = Reloader(LiveConfig(config), None, Environment(), offload, Events(), _keep)

    with pytest.raises(ConfigError, match="come from a program"):
        await reloader.reload()
    assert {row.key: row.value for row in reloader.rows()} == {key: config.value(key) for key in SETTINGS}
    offload.close()


async def test_a_refused_change_of_a_setting_names_the_type_in_words(server: Server) -> None:
    with pytest.raises(ConfigError) as refused:
        await server.reloader.set({"server.idle_timeout_s": "soon"})

    assert str(refused.value) == "server.idle_timeout_s = 'soon': expected a number"


async def test_a_refused_reload_is_logged_with_its_reason(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.file.write_text('[limits]\nchoices = "x"\n')
    with pytest.raises(ConfigError):
        await server.reloader.reload()

    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"not reloaded: {server.file}: limits.choices = 'x': expected a whole number"


async def test_a_reload_reports_how_keys_changed(server: Server, tmp_path: Path) -> None:
    digest = sha256(b"k").hexdigest()
    keys = tmp_path / "keys"
    server.file.write_text(f'[server]\nport = 8000\napi_key_file = "{keys}"\n')
    counts = []
    for lines in ("a:{0}\nb:{0}\n", "a:{0}:team\nc:{0}\n"):
        keys.write_text(lines.format(digest))
        keys.chmod(0o600)
        done = await server.reloader.reload()
        counts.append((done.keys, done.keys_added, done.keys_removed, done.keys_changed))

    assert counts == [(2, 2, 0, 0), (2, 1, 1, 1)]
