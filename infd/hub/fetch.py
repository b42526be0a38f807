"""Choose the files of a model to fetch.

Small files are fetched first, then the weight files that the index names, or one weight
file if there is no index. Code, pickles and second copies of the weights are not fetched.
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

# At least one of these files contains the vocabulary.
VOCABULARIES: Final = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
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
    "encoding/encoding_dsv32.py",  # its presence identifies a checkpoint of DeepSeek V3.2; never run
    INDEX,
)

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_NAMES_SHOWN = 8


class Hub(Protocol):
    """One model on a hub, at one revision."""

    def snapshot(self, patterns: Sequence[str], progress: Progress | None = None) -> Path:
        """Fetch the missing files that match `patterns`; return the directory of all files that match.

        patterns  fnmatch patterns of paths within the repository
        progress  called with (bytes fetched, bytes to fetch), from any thread

        Raises CheckpointError for errors that the user must fix, FetchFailed for temporary errors.
        """

    def listing(self) -> list[str]:
        """Return the paths of all files, for error messages. Raises the errors of `snapshot`."""


def is_id(name: str) -> bool:
    """Return whether a name has the form of a hub's model id."""
    return _ID.fullmatch(name) is not None


def fetch(name: str, hub: Hub, progress: Progress) -> Path:
    """Download a model and return its directory. Blocks.

    Raises the errors of `Hub.snapshot`, and CheckpointError for a model without safetensors.
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
