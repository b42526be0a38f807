"""What the settings point at: a checkpoint's directory, clients' keys, a chat template.

`infd config check` looks here at what `infd start` will, without loading or fetching anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from infd import embedded
from infd.adapters.files import locate
from infd.errors import CheckpointError, ConfigError, StartError
from infd.http.auth import Keys
from infd.hub.fetch import is_id
from infd.text.chat import ChatTemplate
from infd.weights.checkpoint import read_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from infd.config import Config, Environment

EMBEDDED = "embedded"


def check(config: Config, environment: Environment) -> None:
    """Raise ConfigError, with a line for each thing that keeps `infd start` from starting and is quickly found."""

    def model() -> None:
        if (directory := checkpoint(config)) is not None:
            read_config(directory)

    def template() -> None:
        if config.model.chat_template:
            ChatTemplate.of_file(config.model.chat_template)

    def adapters() -> None:
        for path in config.lora.modules.values():
            locate(path)

    looks: tuple[Callable[[], object], ...] = (model, template, lambda: keys(config, environment), adapters)
    problems = []
    for look in looks:
        try:
            look()
        except StartError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def checkpoint(config: Config) -> Path | None:
    """Return the directory of the model, None if it is to be fetched first. Raises CheckpointError, ConfigError."""
    model = config.model
    if _on_hub(config):
        return None
    directory = embedded.path() if model.path == EMBEDDED else Path(model.path)
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory; --model takes a checkpoint directory, a hub id such as org/name,"
            " or 'embedded'"
        )
    if model.revision:
        raise ConfigError(f"model.revision is for models of a hub; {model.path} is none")
    return directory


def _on_hub(config: Config) -> bool:
    return is_id(config.model.path) and not Path(config.model.path).is_dir()


def served_names(config: Config) -> tuple[str, ...]:
    """Return what clients may call the model; the first name is reported."""
    if config.model.served_names:
        return config.model.served_names
    return (config.model.path if _on_hub(config) else Path(config.model.path).resolve().name,)


def lora_root(config: Config) -> str:
    """Return the directory that holds what operators may load as adapters; of the embedded model, its companions'."""
    return config.lora.root or (str(embedded.adapters()) if config.model.path == EMBEDDED else "")


def keys(config: Config, environment: Environment) -> Keys:
    """Return who may ask. Raises ConfigError."""
    path = environment.api_key_file(config)
    if path is not None:
        try:
            return Keys.parse(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"server.api_key_file: {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"server.api_key_file: {path} cannot be read: {error}") from error
    return Keys.of(environment.api_key) if environment.api_key else Keys()
