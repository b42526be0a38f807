"""Sources of settings, and messages for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from infd.config import (
    SETTINGS,
    Assignment,
    Config,
    DeviceConfig,
    Environment,
    HubAccess,
    Loaded,
    limit_thread_spinning,
    load,
)
from infd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def problems(**sources: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(**{"directory": Path("/nonexistent"), **sources})  # type: ignore[arg-type]
    assert caught.value.exit_code == 78
    return str(caught.value).splitlines()


def from_environ(**variables: str) -> Config:
    return load(directory=Path("/nonexistent"), environ=variables).config


def test_nothing_set_means_built_in_values() -> None:
    loaded = load(directory=Path("/nonexistent"))

    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"built-in"}
    assert loaded.origins.keys() == SETTINGS.keys()


def test_each_place_is_stronger_than_the_one_before(tmp_path: Path, write: Write) -> None:
    base = write(
        "infd.toml", "[server]\nport = 1\nhost = '::1'\n[limits]\nchoices = 1\nlogit_bias = 1\nstop_strings = 1"
    )
    first = write("conf.d/10.toml", "[limits]\nchoices = 2\nlogit_bias = 2\nstop_strings = 2")
    second = write("conf.d/20.toml", "[limits]\nlogit_bias = 3\nstop_strings = 3")

    loaded = load(
        directory=tmp_path,
        environ={"INFD_LIMITS__STOP_STRINGS": "4", "INFD_SERVER__PORT": "4"},
        command_line=[Assignment("server.port", "5", "flag --port")],
    )

    assert loaded.config.server.host == ("::1",)
    assert loaded.config.limits.choices == 2
    assert loaded.config.limits.logit_bias == 3
    assert loaded.config.limits.stop_strings == 4
    assert loaded.config.server.port == 5
    assert {key: origin for key, origin in loaded.origins.items() if origin != "built-in"} == {
        "server.host": str(base),
        "limits.choices": str(first),
        "limits.logit_bias": str(second),
        "limits.stop_strings": "environment variable INFD_LIMITS__STOP_STRINGS",
        "server.port": "flag --port",
    }


def test_a_named_file_is_read_instead_of_the_directory(tmp_path: Path, write: Write) -> None:
    write("infd.toml", "[server]\nport = 1")
    other = write("other.toml", "[server]\nhost = '::1'")

    loaded = load(file=other, directory=tmp_path)

    assert (loaded.config.server.host, loaded.config.server.port) == (("::1",), 8000)


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64K", 65536), ("1.5M", 3 * 2**19), ("2G", 2**31), ("2GiB", 2**31), ("2 gb", 2**31)],
)
def test_sizes_may_carry_a_unit(text: str, size: int, write: Write) -> None:
    assert from_environ(INFD_CACHE__BYTES=text).cache.bytes == size
    assert load(file=write("a.toml", f'[cache]\nbytes = "{text}"')).config.cache.bytes == size


def test_text_is_converted_to_the_type_of_the_setting() -> None:
    config = from_environ(
        INFD_LOG__BANNER="false",
        INFD_MODEL__SERVED_NAMES="a, b",
        INFD_SERVER__DRAIN_TIMEOUT_S="1.5",
        INFD_DEVICE__DEPTH="null",
    )

    assert config.log.banner is False
    assert config.model.served_names == ("a", "b")
    assert config.server.drain_timeout_s == 1.5
    assert config.device.depth is None


@pytest.mark.parametrize("text", ['host = "::1"', 'host = ["::1"]'])
def test_one_value_of_several_needs_no_brackets(text: str, write: Write) -> None:
    assert load(file=write("a.toml", f"[server]\n{text}")).config.server.host == ("::1",)


@pytest.mark.parametrize(
    "origin", ["https://chat.example/", "https://chat.example\\n", "chat.example", "", "https://a b"]
)
def test_an_origin_is_written_as_browsers_send_it(origin: str, write: Write) -> None:
    (line,) = problems(file=write("a.toml", f'[server]\ncors_origins = ["{origin}"]'))

    assert "server.cors_origins" in line


def test_toml_values_keep_their_type(write: Write) -> None:
    file = write("a.toml", '[server]\nport = "8000"')

    assert problems(file=file) == [f"{file}: server.port = '8000': expected a whole number"]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("server.prot", "server.port"),
        ("sever.port", "server.port"),
        ("port", "server.port"),
        ("model.port", "server.port"),
        ("cache.max_num_seqs", "scheduler.max_num_seqs"),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(key: str, nearest: str) -> None:
    assert problems(command_line=[Assignment(key, "1", "flag --set")]) == [
        f"flag --set: unknown setting {key}; the nearest known one is {nearest}"
    ]


def test_an_item_of_a_table_is_no_setting_and_the_form_of_the_table_is_shown() -> None:
    (line,) = problems(command_line=[Assignment("quotas.tenants.alice", "share=2", "flag --set", text=True)])
    form = """quotas.tenants='{alice = "share=2"}'"""

    assert line.endswith(f"set as a whole table, as in {form}")
    value = form.partition("=")[2].strip("'")
    config = load(command_line=[Assignment("quotas.tenants", value, "flag --set", text=True)]).config
    assert config.quotas.tenants == {"alice": "share=2"}


def test_an_unknown_key_without_a_near_one_names_all_of_its_table() -> None:
    assert problems(command_line=[Assignment("quotas.foo", "1", "flag --set")]) == [
        "flag --set: unknown setting quotas.foo; [quotas] has requests_per_minute, tokens_per_minute, burst_s, tenants"
    ]


def test_all_problems_are_reported_at_once_each_with_its_place(tmp_path: Path, write: Write) -> None:
    file = write("infd.toml", "[server]\nport = 99999\n[device]\nkind = 'tpu'\n[modle]\n")
    broken = write("conf.d/broken.toml", "[server\n")

    lines = problems(directory=tmp_path, environ={"INFD_CACHE__BYTES": "lots"})

    assert f"{file}: server.port = 99999: expected int <= 65535" in lines
    assert f"{file}: device.kind = 'tpu': expected auto|cpu|cuda|cuda:N|null" in lines
    assert any(line.startswith(f"{broken}: is not TOML: ") for line in lines)
    assert f"{file}: unknown table [modle]; the nearest known one is [model]" in lines
    assert (
        "environment variable INFD_CACHE__BYTES: cache.bytes = 'lots': expected a size such as 1048576, 512M or 2G"
        in lines
    )
    assert len(lines) == 5


def test_a_misspelt_table_is_one_mistake(write: Write) -> None:
    file = write("a.toml", "[servr]\nport = 1\nnonsense = 2\n")

    assert problems(file=file) == [f"{file}: unknown table [servr]; the nearest known one is [server]"]


def test_a_value_that_is_overridden_is_checked_too(write: Write) -> None:
    file = write("a.toml", "[server]\nport = -1")

    assert problems(file=file, command_line=[Assignment("server.port", "1", "flag --port")]) == [
        f"{file}: server.port = -1: expected int >= 0"
    ]


def test_a_table_is_not_a_value(write: Write) -> None:
    file = write("a.toml", "server = 1")

    assert problems(file=file) == [f"{file}: server is a table, [server], and cannot have a value itself"]


def test_a_named_file_that_is_missing_is_a_problem() -> None:
    assert problems(file=Path("/nonexistent/a.toml")) == [
        "/nonexistent/a.toml: cannot be read: No such file or directory"
    ]


def test_a_file_that_is_not_text_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xff\xfe")

    (line,) = problems(file=tmp_path / "a.toml")
    assert "is not TOML" in line


def test_variables_that_orchestrators_inject_are_not_settings() -> None:
    assert from_environ(INFD_SERVICE_HOST="10.0.0.1", INFD_PORT="tcp://10.0.0.1:80", INFD_ADMIN_SOCKET="/x") == Config()


@pytest.mark.parametrize("variable", ["INFD_SERVER_PORT", "INFD_PORT"])
def test_a_variable_that_lacks_an_underscore_is_an_error_unless_kubernetes_sets_it(variable: str) -> None:
    assert problems(environ={variable: "8001"}) == [
        f"environment variable {variable}: settings have two underscores: INFD_SERVER__PORT"
    ]
    assert from_environ(**{variable: "tcp://10.0.0.1:8000", "INFD_SERVER_PORT_8000_TCP_PROTO": "tcp"}) == Config()


@pytest.mark.parametrize("text", ['["127.0.0.1", "::1"]', "['127.0.0.1', '::1',]", "127.0.0.1, ::1"])
def test_a_list_is_written_as_in_toml_or_with_commas(text: str) -> None:
    assert from_environ(INFD_SERVER__HOST=text).server.host == ("127.0.0.1", "::1")


def test_a_broken_list_is_an_error() -> None:
    (problem,) = problems(environ={"INFD_SERVER__HOST": '["127.0.0.1"'})
    assert "not a list" in problem


def test_an_empty_name_is_not_served() -> None:
    (problem,) = problems(environ={"INFD_MODEL__SERVED_NAMES": ""})
    assert "model.served_names" in problem


def test_a_misspelt_variable_is_an_error() -> None:
    assert problems(environ={"INFD_SERVR__PORT": "1"}) == [
        "environment variable INFD_SERVR__PORT: unknown setting servr.port; the nearest known one is server.port"
    ]


def test_every_setting_has_help_and_flags_are_unique() -> None:
    flags = [setting.flag for setting in SETTINGS.values() if setting.flag is not None]

    assert all(setting.help and setting.values for setting in SETTINGS.values())
    assert len(flags) == len(set(flags))


def test_loaded_values_are_reached_by_key() -> None:
    loaded: Loaded = load(directory=Path("/nonexistent"))

    assert loaded.config.value("server.port") == 8000


def test_the_admin_socket_is_where_the_runtime_directory_is() -> None:
    def socket(uid: int = 0, **variables: str) -> str:
        return str(Environment.read(variables, pid=7, uid=uid).admin_socket(Config()))

    assert socket() == "/run/infd/admin.sock"
    assert socket(uid=1000) == "/tmp/infd-1000/admin.sock"
    assert socket(uid=1000, XDG_RUNTIME_DIR="/run/user/1000") == "/run/user/1000/infd/admin.sock"
    assert socket(XDG_RUNTIME_DIR="/run/user/7") == "/run/user/7/infd/admin.sock"
    assert socket(XDG_RUNTIME_DIR="/run/user/7", RUNTIME_DIRECTORY="/run/infd-a:/run/b") == "/run/infd-a/admin.sock"
    assert socket(RUNTIME_DIRECTORY="/run/infd-a", INFD_ADMIN_SOCKET="/x/a.sock") == "/x/a.sock", "as for infdctl"
    configured = from_environ(INFD_ADMIN__SOCKET="/y/a.sock")
    environment = Environment.read({"INFD_ADMIN_SOCKET": "/x/a.sock"}, pid=7, uid=0)
    assert str(environment.admin_socket(configured)) == "/y/a.sock"


def test_inherited_sockets_count_only_for_the_process_they_are_named_for() -> None:
    def inherited(pid: str, count: str = "2") -> int:
        return Environment.read({"LISTEN_FDS": count, "LISTEN_PID": pid}, pid=7, uid=0).inherited

    assert inherited("7") == 2
    assert inherited("8") == 0
    assert inherited("7", "two") == 0
    assert Environment.read({"LISTEN_FDS": "2"}, pid=7, uid=0).inherited == 0


def test_the_watchdog_counts_only_for_the_process_it_names() -> None:
    def watchdog(pid: str) -> float | None:
        return Environment.read({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": pid}, pid=7, uid=0).watchdog_s

    assert watchdog("7") == 30.0
    assert watchdog("8") is None
    assert Environment.read({"WATCHDOG_USEC": "30000000"}, pid=7, uid=0).watchdog_s == 30.0


def test_keys_come_from_the_setting_or_else_from_systemds_credentials(tmp_path: Path) -> None:
    environment = Environment.read({"CREDENTIALS_DIRECTORY": str(tmp_path)}, pid=7, uid=0)
    configured = from_environ(INFD_SERVER__API_KEY_FILE="/keys")

    assert environment.api_key_file(Config()) is None
    (tmp_path / "api-keys").touch()
    assert environment.api_key_file(Config()) == tmp_path / "api-keys"
    assert environment.api_key_file(configured) == Path("/keys")


@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({}, HubAccess()),
        ({"HF_HOME": "/data/hf"}, HubAccess(cache=Path("/data/hf/hub"))),
        ({"HF_HOME": "/data/hf", "HF_HUB_CACHE": "/fast"}, HubAccess(cache=Path("/fast"))),
        ({"HF_ENDPOINT": "https://hub.example/"}, HubAccess(endpoint="https://hub.example")),
        ({"HF_TOKEN": "hf_secret", "HF_HUB_OFFLINE": "1"}, HubAccess(token="hf_secret", offline=True)),
        ({"HF_TOKEN": "", "HF_HUB_OFFLINE": "0", "HF_HOME": "", "HF_ENDPOINT": ""}, HubAccess()),
    ],
)
def test_the_hub_is_reached_as_its_own_variables_say(variables: dict[str, str], hub: HubAccess) -> None:
    assert Environment.read(variables, pid=1, uid=0).hub == hub


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        (
            {"GOMP_SPINCOUNT": "7", "OPENBLAS_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"},
            {"GOMP_SPINCOUNT": "7", "OPENBLAS_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "true"},
        ),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_threads_wait_calmly_unless_the_user_says_how(before: dict[str, str], after: dict[str, str]) -> None:
    limit_thread_spinning(before)

    assert before == {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **after}


@pytest.mark.parametrize(
    ("setting", "values"),
    [
        ("INFD_SCHEDULER__STEP_TARGET_MS", ["0", "inf", "nan", "1e300"]),
        ("INFD_SERVER__DRAIN_TIMEOUT_S", ["-1", "inf", "nan"]),
        ("INFD_DEVICE__THREADS", ["0", "10000"]),
    ],
)
def test_a_number_that_no_daemon_could_start_with_is_refused(setting: str, values: list[str]) -> None:
    for value in values:
        (problem,) = problems(environ={setting: value})
        assert setting in problem


@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({"CACHE_DIRECTORY": "/var/cache/infd:/x", "XDG_CACHE_HOME": "/home/a/.cache"}, "/var/cache/infd/kernels"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/home/a"}, "/c/infd/kernels"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.cache/infd/kernels"),
        ({}, "None"),
    ],
)
def test_compiled_kernels_are_kept_in_the_cache_directory_or_the_configured_one(
    variables: dict[str, str], kept: str
) -> None:
    environment = Environment.read(variables, pid=7, uid=1000)
    assert str(environment.kernel_cache(Config())) == kept
    assert environment.kernel_cache(Config(device=DeviceConfig(kernel_cache="/k"))) == Path("/k")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (
            "server.cors_origins",
            "foo",
            "server.cors_origins = 'foo': expected web origins allowed to call the API",
        ),
        ("lora.modules", ("pirate",), "lora.modules = 'pirate': expected NAME=VALUE"),
        ("quotas.tenants", "{red = 2}", "quotas.tenants = '{red = 2}': red: expected a text in quotes"),
        ("model.served_names", ("a", ""), "model.served_names = 'a', '': item 2: expected str of length >= 1"),
    ],
)
def test_a_refused_value_is_shown_as_it_was_written(key: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(command_line=[Assignment(key, value, "flag --x")])

    assert str(refused.value).startswith(f"flag --x: {told}")


@pytest.mark.parametrize(
    ("written", "tenants"),
    [
        ("{}", {}),
        ('{red = "share=4", blue = "share=1"}', {"red": "share=4", "blue": "share=1"}),
        ("red=share=4, blue=share=1", {"red": "share=4", "blue": "share=1"}),
    ],
)
def test_a_table_is_written_as_in_toml_or_in_items(written: str, tenants: dict[str, str]) -> None:
    assert load(command_line=[Assignment("quotas.tenants", written, "flag --set")]).config.quotas.tenants == tenants
