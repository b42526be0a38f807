"""Merge settings key by key, in increasing precedence: built-in values, files, INFD_SECTION__KEY, command line.

One error reports all problems with their origins.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from infd.config.settings import SETTINGS, Setting
from infd.config.tree import Config
from infd.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

DIRECTORY = Path("/etc/infd")
BUILT_IN = "built-in"

# Variables of infd that are no settings.
OTHER_VARIABLES = frozenset({"INFD_API_KEY", "INFD_ADMIN_SOCKET"})
# Kubernetes sets INFD_PORT=tcp://10.0.0.1:8000 for a service named infd, INFD_SERVER_PORT for one named infd-server.
_SERVICE_LINK = re.compile(r"(tcp|udp|sctp)://")
_ITEM = re.compile(r"\[(\d+)\]$")  # in msgspec's path of a refused item
_WRONG_TYPE = re.compile(r"Expected ([a-z |]+), got [a-z]+")  # msgspec's message
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "array": "a list",
    "object": "a table",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Assignment(Struct, frozen=True):
    """A value assigned to a key, before validation.

    value   from TOML, a typed value; from a variable or flag, a string, a tuple of strings, or False for a --no- flag
    origin  file, variable or flag, for messages and `config show --origin`
    text    whether strings in `value` are parsed: "8000" may be a number
    """

    key: str
    value: object
    origin: str
    text: bool = True


class Loaded(Struct, frozen=True):
    """The settings in force, the origin of each key, and where to read them again."""

    config: Config
    origins: Mapping[str, str]
    sources: Sources


class Sources(Struct, frozen=True):
    """The origins of a process's settings, to be read again by a reload; fields as the arguments of `load`."""

    file: Path | None
    directory: Path
    environ: Mapping[str, str]
    command_line: Sequence[Assignment]

    def load(self, *changes: Assignment) -> Loaded:
        """Read the settings; `changes` have the highest precedence. Raises ConfigError."""
        return load(
            file=self.file,
            directory=self.directory,
            environ=self.environ,
            command_line=(*self.command_line, *changes),
        )


def load(
    *,
    file: Path | None = None,
    directory: Path = DIRECTORY,
    environ: Mapping[str, str] | None = None,
    command_line: Sequence[Assignment] = (),
) -> Loaded:
    """Return the settings in force.

    file          read this file instead of `infd.toml` and `conf.d/*.toml` in `directory`
    environ       environment variables; variables named INFD_SECTION__KEY are settings
    command_line  assignments of flags

    Raises ConfigError with one line per problem.
    """
    problems: list[str] = []
    values: dict[str, dict[str, object]] = {}
    origins = dict.fromkeys(SETTINGS, BUILT_IN)
    for assignment in (
        *_from_files(file, directory, problems),
        *_from_environ(environ or {}, problems),
        *command_line,
    ):
        setting = SETTINGS.get(assignment.key)
        if setting is None:
            problems.append(f"{assignment.origin}: {_unknown(assignment)}")
            continue
        try:
            value = _typed(setting, assignment)
        except (msgspec.ValidationError, ValueError) as error:
            problems.append(
                f"{assignment.origin}: {setting.key} = {_shown(assignment.value)}: {_readable(error, setting)}"
            )
            continue
        section, _, name = setting.key.partition(".")
        values.setdefault(section, {})[name] = value
        origins[setting.key] = assignment.origin
    if problems:
        raise ConfigError("\n".join(problems))
    sources = Sources(file, directory, environ or {}, tuple(command_line))
    return Loaded(msgspec.convert(values, Config), origins, sources)


def _from_files(file: Path | None, directory: Path, problems: list[str]) -> Iterator[Assignment]:
    if file is not None:
        paths: Iterable[Path] = [file]
    else:
        paths = [directory / "infd.toml", *sorted((directory / "conf.d").glob("*.toml"))]
    for path in paths:
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            if file is not None:
                problems.append(f"{path}: cannot be read: {error.strerror}")
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            problems.append(f"{path}: is not TOML: {error}")
        else:
            yield from _flatten(document, str(path))


def _flatten(document: Mapping[str, Any], origin: str) -> Iterator[Assignment]:
    for name, content in document.items():
        if not isinstance(content, dict):
            yield Assignment(name, content, origin, text=False)
        elif name not in Config.__struct_fields__:
            # An unknown table is reported once, not for each of its keys.
            yield Assignment(name, content, origin, text=False)
        else:
            for key, value in content.items():
                yield Assignment(f"{name}.{key}", value, origin, text=False)


def _from_environ(environ: Mapping[str, str], problems: list[str]) -> Iterator[Assignment]:
    for variable in sorted(environ):
        if not variable.startswith("INFD_") or variable in OTHER_VARIABLES:
            continue
        section, separator, name = variable.removeprefix("INFD_").partition("__")
        if separator:
            yield Assignment(f"{section}.{name}".lower(), environ[variable], f"environment variable {variable}")
        elif (meant := _meant(section.lower())) and not _SERVICE_LINK.match(environ[variable]):
            problems.append(f"environment variable {variable}: settings have two underscores: {meant}")


def _meant(name: str) -> str | None:
    """Return the variable of the setting whose name lacks an underscore, or its section; None: another program's."""
    section, _, rest = name.partition("_")
    keys = [key for key in SETTINGS if key == f"{section}.{rest}"]
    keys = keys or [key for key in SETTINGS if key.partition(".")[2] == name]
    return f"INFD_{keys[0].replace('.', '__').upper()}" if len(keys) == 1 else None


def _typed(setting: Setting, assignment: Assignment) -> object:
    value = assignment.value
    if setting.mapping and not isinstance(value, dict):
        value = _table(value)
    elif isinstance(value, str):
        if setting.sized:
            value = _size(value)
        elif setting.repeatable:
            value = _items(value) if assignment.text else [value]
    return msgspec.convert(value, setting.type, strict=not assignment.text)


def _items(text: str) -> list[object]:
    """Parse `a, b`, or `["a", "b"]` as in TOML and JSON. Raises ValueError."""
    if not text.lstrip().startswith("["):
        return [item.strip() for item in text.split(",")]
    try:
        return list(tomllib.loads(f"items = {text.strip()}")["items"])
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"not a list: {error}") from None


def _table(value: object) -> dict[str, str]:
    """Parse NAME=VALUE items, separated by commas or in a list, or `{NAME = "VALUE"}` as in TOML. Raises ValueError."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _inline_table(value)
    items = value.split(",") if isinstance(value, str) else value
    table: dict[str, str] = {}
    for item in items if isinstance(items, (list, tuple)) else [items]:
        name, separator, text = str(item).partition("=")
        if not separator:
            raise ValueError("expected NAME=VALUE")
        if name.strip() in table:
            raise ValueError(f"{name.strip()} is given twice")
        table[name.strip()] = text.strip()
    return table


def _inline_table(text: str) -> dict[str, str]:
    try:
        table = tomllib.loads(f"items = {text.strip()}")["items"]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"not a table: {error}") from None
    for name, item in table.items():
        if not isinstance(item, str):
            raise ValueError(f"{name}: expected a text in quotes")
    return dict(table)


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a size such as 1048576, 512M or 2G")
    try:
        return int(float(match[1]) * _UNITS[match[2].upper()])
    except OverflowError:
        raise ValueError("it is too large") from None


def _unknown(assignment: Assignment) -> str:
    key = assignment.key
    if isinstance(assignment.value, dict):
        (near,) = difflib.get_close_matches(key, Config.__struct_fields__, n=1, cutoff=0.0)
        return f"unknown table [{key}]; the nearest known one is [{near}]"
    if key in Config.__struct_fields__:
        return f"{key} is a table, [{key}], and cannot have a value itself"
    within = next((known for known in SETTINGS if SETTINGS[known].mapping and key.startswith(f"{known}.")), None)
    if within is not None:
        name = key.removeprefix(f"{within}.")
        item = f"{{{name} = {json.dumps(assignment.value)}}}"
        return f"unknown setting {key}; {within} is set as a whole table, as in {within}='{item}'"
    table, _, name = key.partition(".")
    names = [known.partition(".")[2] for known in SETTINGS if known.startswith(f"{table}.")]
    near = _nearest(key)
    if names and near.partition(".")[2] != name and not difflib.get_close_matches(name, names, n=1, cutoff=0.7):
        return f"unknown setting {key}; [{table}] has {', '.join(names)}"
    return f"unknown setting {key}; the nearest known one is {near}"


def _nearest(key: str) -> str:
    by_name = {known.partition(".")[2]: known for known in SETTINGS}
    name = key.rpartition(".")[2]
    if name in by_name:
        return by_name[name]  # a known name in the wrong table
    for near in difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.7):
        return near
    for near in difflib.get_close_matches(name, by_name, n=1, cutoff=0.5):
        return by_name[near]
    return difflib.get_close_matches(key, SETTINGS, n=1, cutoff=0.0)[0]


def _shown(value: object) -> str:
    """Return a refused value as a user writes it: a flag's list without brackets, other lists and tables as TOML."""
    if isinstance(value, tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_shown(item)}" for name, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)


def _readable(error: Exception, setting: Setting) -> str:
    text = str(error).replace("`", "")
    if "enum value" in text or setting.accepted is not None:
        return f"expected {setting.values}"
    if "matching regex" in text:
        return f"expected {setting.help}"
    text, _, place = text.partition(" - at ")
    item = f"item {int(found[1]) + 1}: " if (found := _ITEM.search(place)) else ""
    if wrong := _WRONG_TYPE.fullmatch(text):
        return f"{item}expected {' or '.join(_TYPES.get(kind, kind) for kind in wrong[1].split(' | '))}"
    return item + text[:1].lower() + text[1:]
