"""What the settings point at: a checkpoint's directory, clients' keys, a chat template.

`infd config check` looks here at what `infd start` will, without loading or fetching anything; at the model, in
`examine.py`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from infd import embedded
from infd.adapters.files import locate
from infd.adapters.peft import PeftConfig
from infd.apart.client import Worker
from infd.daemon.examine import Examined, examine, weight_files
from infd.errors import CheckpointError, ConfigError
from infd.http.auth import Keys
from infd.hub.cached import cached
from infd.hub.fetch import is_id
from infd.text import apart
from infd.text.chat import ChatTemplate
from infd.weights.checkpoint import TensorFile

if TYPE_CHECKING:
    from infd.config import Config, Environment

EMBEDDED = "embedded"


def check(config: Config, environment: Environment) -> list[str]:
    """Return what only `infd start` finds out.

    Raises ConfigError, with a line for each thing that keeps it from starting and is found out without torch.
    """
    directory: Path | None = None
    found = Examined()

    def model() -> None:
        nonlocal directory
        directory = checkpoint(config)

    def template() -> None:
        if config.model.chat_template and directory is None:  # else it was read together with the model's
            with closing(Worker(apart.MODULE)) as worker:
                ChatTemplate.of_file(config.model.chat_template, worker=worker)

    def adapters() -> None:
        for path in config.lora.modules.values():
            files = locate(path)
            PeftConfig.read(files.config)
            TensorFile(files.tensors).close()

    found.collect(model)
    if directory is None and not found.faults:
        directory = _fetched(config, environment)
        if directory is None:
            found.unchecked.append(f"{config.model.path}, which is not here: `infd start` fetches it")
    if directory is not None:
        seen = examine(directory, config)
        found.faults += seen.faults
        found.unchecked += seen.unchecked
    found.collect(template)
    found.collect(lambda: keys(config, environment))
    found.collect(adapters)
    if config.lora.modules:
        found.unchecked.append("whether the adapters fit the model")
    if found.faults:
        raise ConfigError("\n".join(found.faults))
    return found.unchecked


def _fetched(config: Config, environment: Environment) -> Path | None:
    """Return where a hub's model is, if all of it has been fetched before and no other revision is asked for."""
    if config.model.hub != "huggingface" or config.model.revision:
        return None
    directory = dict(cached(environment.hub)).get(config.model.path)
    try:
        whole = directory is not None and all(path.exists() for path in weight_files(directory))
    except CheckpointError:  # of the index, which start will name
        whole = True
    return directory if whole else None


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
