"""Choose the files of a model to fetch.

Small files are fetched first, then the weight files that the index names, or one weight
file if there is no index. If the model's name ends in a tag, only the GGUF file of this
tag is fetched. Of a LoRA adapter, PEFT's two files are fetched. Code, second copies of the
weights and pickles are not fetched, except the pickles of small layers of models that are pooled.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import TYPE_CHECKING, Final, Protocol

from infd.errors import CheckpointError
from infd.gguf import SUFFIX
from infd.gguf.file import first_parts, title
from infd.pooling import M3_FILES
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
    "modules.json",  # from here on, of models that are pooled
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "[0-9]_*/config.json",
)
# Weights of the small layers of models that are pooled: `pooling.weight_files`.
LAYERS: Final = ("[0-9]_*/model.safetensors", "[0-9]_*/pytorch_model.bin", *M3_FILES)

# The files of a LoRA adapter, as PEFT names them.
ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"

_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([A-Za-z0-9][\w.-]*))?", re.ASCII)
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
    """Return whether a name has the form of a hub's model id, with or without the tag of a GGUF file."""
    return _ID.fullmatch(name) is not None


def split(name: str) -> tuple[str, str | None]:
    """Return a model's id on the hub, and the tag of a GGUF file, such as "Q4_K_M", or None."""
    found = _ID.fullmatch(name)
    return (name, None) if found is None else (found[1], found[2])


def fetch(name: str, hub: Hub, progress: Progress, *, adapters: bool = False) -> Path:
    """Download a model and return its directory, or the path of its GGUF file. Blocks.

    name      the model's id; with a tag, only the GGUF file of this tag is fetched
    adapters  whether the id may be that of a LoRA adapter, of which PEFT's two files are fetched

    Raises the errors of `Hub.snapshot`, and CheckpointError for a model without these weights.
    """
    if (tag := split(name)[1]) is not None:
        directory = hub.snapshot(_tagged(tag), progress)
        if (file := find_gguf(directory, tag)) is None:
            raise CheckpointError(_without_tag(name, hub.listing()))
        return file
    directory = hub.snapshot((*TEXTS, ADAPTER_CONFIG) if adapters else TEXTS)
    if adapters and (directory / ADAPTER_CONFIG).exists() and not (directory / "config.json").exists():
        directory = hub.snapshot([ADAPTER_TENSORS], progress)
        if not (directory / ADAPTER_TENSORS).exists():
            raise CheckpointError(f"{name} has no {ADAPTER_TENSORS}: load the adapter with PEFT, and save it")
        return directory
    index = directory / INDEX
    weights = sorted(set(indexed_files(index).values())) if index.exists() else [SINGLE]
    directory = hub.snapshot([*weights, *LAYERS], progress)
    missing = [file for file in weights if not (directory / file).exists()]
    if missing:
        raise CheckpointError(_without_weights(name, missing, hub.listing()))
    return directory


def find_gguf(directory: Path, tag: str) -> Path | None:
    """Return the only GGUF file of a tag in a fetched model, or the first of its parts; None: there is none.

    Raises CheckpointError if there are several.
    """
    patterns = _tagged(tag)
    names = [str(path.relative_to(directory)) for path in directory.rglob("*.gguf")]
    found = first_parts([name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)])
    if len(found) > 1:
        raise CheckpointError(f"{directory}: several files match {tag!r}: name one with --model: {', '.join(found)}")
    return directory / found[0] if found else None


def tag_of(file: PurePath) -> str:
    """Return the tag by which `find_gguf` finds a file: the end of its name, such as "Q4_K_M"."""
    return re.split(r"[-.]", title(file))[-1]


def _tagged(tag: str) -> list[str]:
    """Return patterns for the GGUF files whose names, without part numbers, end in a separator and the tag."""
    spellings = sorted({tag, tag.upper(), tag.lower()})
    return [f"*[-._]{each}{part}{SUFFIX}" for each in spellings for part in ("", "-?????-of-?????")]


def _without_tag(name: str, found: list[str]) -> str:
    files = first_parts(found)
    shown = ", ".join(files[:_NAMES_SHOWN]) + (", ..." if len(files) > _NAMES_SHOWN else "")
    return f"{name}: no GGUF file's name ends in this tag. It has {shown or 'no GGUF files at all'}"


def _without_weights(name: str, missing: list[str], found: list[str]) -> str:
    weights = [path for path in found if path.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))]
    shown = ", ".join(weights[:_NAMES_SHOWN]) + (", ..." if len(weights) > _NAMES_SHOWN else "")
    return (
        f"{name} has no {missing[0]}; infd reads safetensors under the names that transformers writes, and GGUF files. "
        f"It has {shown or 'no weights at all'}. {_remedy(name, weights)}"
    )


def _remedy(name: str, weights: list[str]) -> str:
    if files := [path for path in first_parts(weights) if path.endswith(SUFFIX)]:
        return f"Name one of its GGUF files by the end of its name: {name}:{tag_of(PurePath(files[0]))}"
    if ADAPTER_TENSORS in weights:
        return f"It is a LoRA adapter: `infd pull {name}` fetches it; --lora serves it beside its base model"
    if any(path.endswith(".bin") for path in weights):
        return (
            "If you trust the origin of these pickled weights, transformers converts them:"
            f' AutoModel.from_pretrained("{name}").save_pretrained(DIRECTORY); its tokenizer and the other files belong'
            " there too"
        )
    return "Choose another model, or another --revision"
