"""Override the pooling that a checkpoint's files describe by the settings [pooling]."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct, structs

from infd.errors import CheckpointError, ConfigError
from infd.pooling.reading import Task, read
from infd.untrusted import read as read_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from infd.config import PoolingConfig
    from infd.pooling.settings import PoolingSettings

TASKS: Final[Mapping[str, Task]] = MappingProxyType(
    {"auto": "auto", "generate": "none", "embed": "embed", "classify": "classify"}
)
LABEL_TOKENS: Final = "classifier_from_token"  # key of config.json, as vLLM names it


class _Vocabulary(Struct):
    """`model` of tokenizer.json: a table of ids, or a list of tokens with scores."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Added(Struct):
    id: int
    content: str


class _Tokenizer(Struct):
    """What names the tokens in tokenizer.json."""

    model: _Vocabulary
    added_tokens: list[_Added] = []


def configured(settings: PoolingConfig, directory: Path, config: Mapping[str, Any]) -> PoolingSettings:
    """Return how the checkpoint at `directory` is pooled.

    config  content of its config.json

    Raises CheckpointError, and ConfigError if a setting does not suit the checkpoint.
    """
    tokens = settings.label_tokens or tuple(config.get(LABEL_TOKENS) or ())
    task = TASKS[settings.task]
    found = read(directory, config, task="classify" if tokens and task == "auto" else task)
    if tokens and "classify" in found.tasks:
        found = _by_tokens(found, tokens, directory)
    elif settings.label_tokens:
        raise ConfigError(f"pooling.label_tokens: the model does not classify with pooling.task {settings.task!r}")
    if settings.step_token:
        found = _by_steps(found, settings.step_token, directory)
    changed: dict[str, object] = {}
    if settings.mode != "auto":
        changed["pooling"] = settings.mode
    if settings.normalize != "auto":
        changed["normalize"] = settings.normalize == "yes"
    if settings.activation != "auto":
        changed["activation"] = settings.activation
    if changed and not found.tasks:
        raise ConfigError("pooling: the model generates; choose what it pools for with pooling.task (--task)")
    return structs.replace(found, **changed)


def _by_tokens(found: PoolingSettings, tokens: tuple[str, ...], directory: Path) -> PoolingSettings:
    """Return settings whose labels are tokens: one label for two tokens, the odds of the second."""
    ids = token_ids(directory, tokens)
    labels = tokens[1:] if len(tokens) == 2 else tokens
    return structs.replace(
        found,
        pooling="lasttoken",
        label_tokens=ids,
        labels=labels,
        pairs=len(labels) == 1,
        activation="sigmoid" if len(labels) == 1 else "softmax",
    )


def _by_steps(found: PoolingSettings, token: str, directory: Path) -> PoolingSettings:
    """Return settings with labels of the tokens that end steps alone. Raises ConfigError if no token has labels."""
    if found.label_tokens:
        found = structs.replace(found, tasks=("token_classify",), pairs=False)
    if "token_classify" not in found.tasks or found.token_weight is not None:
        raise ConfigError("pooling.step_token: the model gives tokens no labels; pooling.label_tokens names some")
    return structs.replace(found, step_token=token_ids(directory, (token,), "pooling.step_token")[0])


def token_ids(directory: Path, tokens: tuple[str, ...], setting: str = "pooling.label_tokens") -> tuple[int, ...]:
    """Return the ids of tokens, which are spelled as tokenizer.json spells them. Raises CheckpointError."""
    path = directory / "tokenizer.json"
    try:
        tokenizer = msgspec.json.decode(read_file(path), type=_Tokenizer)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    vocab = tokenizer.model.vocab
    known = vocab if isinstance(vocab, dict) else {token: number for number, (token, _) in enumerate(vocab)}
    known |= {each.content: each.id for each in tokenizer.added_tokens}
    if missing := [token for token in tokens if token not in known]:
        raise CheckpointError(f"{path}: no tokens {', '.join(map(repr, missing))}, which {setting} names")
    return tuple(known[token] for token in tokens)
