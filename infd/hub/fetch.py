"""Decide which files of a model are fetched.

Small files first. They name the weights: the files of the index, or the one
file where there is no index. Nothing else is asked for, so no code, no pickle,
and no second copy of the weights under another name.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

from infd.errors import CheckpointError
from infd.weights.checkpoint import INDEX, SINGLE, indexed_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Progress = Callable[[int, int], None]

# One of them holds the vocabulary.
VOCABULARIES: Final = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
TEXTS: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    *VOCABULARIES,
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    INDEX,
)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_NAMES_SHOWN = 8


class Hub(Protocol):
    """One model on a hub, at one revision."""

    def snapshot(self, patterns: Sequence[str], progress: Progress | None = None) -> Path:
        """Return the directory that holds the files that match, fetching those that are not there yet.

        patterns  as for fnmatch, against the path within the repository
        progress  called with (bytes fetched, bytes to fetch), from any thread

        Raises CheckpointError for what only the user can mend, FetchFailed for what may pass.
        """

    def listing(self) -> list[str]:
        """Return the paths of all files, to tell what there is instead. Raises what `snapshot` raises."""


def is_id(name: str) -> bool:
    """Say whether a name has the form of a hub's ids."""
    return _ID.fullmatch(name) is not None


def fetch(name: str, hub: Hub, progress: Progress) -> Path:
    """Bring a model onto this machine and return its directory. Blocks for as long as that takes.

    Raises what `Hub.snapshot` raises, and CheckpointError for a model without safetensors.
    """
    directory = hub.snapshot(TEXTS)
    index = directory / INDEX
    weights = sorted(set(indexed_files(index).values())) if index.exists() else [SINGLE]
    directory = hub.snapshot(weights, progress)
    missing = [file for file in weights if not (directory / file).exists()]
    if missing:
        raise CheckpointError(_without_weights(name, missing, hub.listing()))
    return directory


def _without_weights(name: str, missing: list[str], found: list[str]) -> str:
    weights = [path for path in found if path.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))]
    shown = ", ".join(weights[:_NAMES_SHOWN]) + (", ..." if len(weights) > _NAMES_SHOWN else "")
    return (
        f"{name} has no {missing[0]}; infd reads safetensors only, under the names that transformers writes. "
        f"It has {shown or 'no weights at all'}. Choose another model, or another --revision"
    )
