"""Read a checkpoint's small text files, which complement tokenizer.json.

These files contain special tokens, chat templates and end ids. If two files disagree,
infd reads the file that transformers reads, so that prompts equal the prompts of
training.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct

from infd.errors import CheckpointError
from infd.gguf import is_gguf
from infd.gguf import text as gguf
from infd.text import tekken
from infd.untrusted import read

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Additions(Struct, frozen=True):
    """The tokens that the small files add to a tokenizer.

    tokens         tokens to add to a vocabulary that lacks them, each as its JSON object
    special        special tokens
    split_special  whether special tokens in a text are encoded as ordinary characters
    """

    tokens: tuple[dict[str, Any], ...]
    special: tuple[str, ...]
    split_special: bool


class TextFiles(Struct, frozen=True, kw_only=True):
    """The small text files of one checkpoint.

    special_tokens     role to token, such as "eos_token" to "<|im_end|>"; templates read these tokens as variables
    extra_special      further special tokens, without a role
    added_tokens       tokens to add to a vocabulary that lacks them, by id; each as its JSON object
    split_special      whether special tokens in a text are encoded as ordinary characters
    templates          chat templates by name, usually "default" only
    tokenizer_config   content of tokenizer_config.json, in older checkpoints merged with special_tokens_map.json
    generation_config  content of generation_config.json
    end_ids            ids that end an answer according to the configuration files
    model_type         the architecture, from config.json; empty if unknown
    """

    directory: Path
    special_tokens: dict[str, str]
    extra_special: tuple[str, ...]
    added_tokens: dict[int, dict[str, Any]]
    split_special: bool
    templates: dict[str, str]
    tokenizer_config: dict[str, Any] = {}
    generation_config: dict[str, Any]
    end_ids: frozenset[int]
    model_type: str = ""

    @property
    def additions(self) -> Additions:
        named = (self.special_tokens[role] for role in NAMED_TOKENS if role in self.special_tokens)
        return Additions(
            tokens=tuple(token for _, token in sorted(self.added_tokens.items())),
            special=(*named, *self.extra_special),
            split_special=self.split_special,
        )

    @classmethod
    def read(cls, directory: str | Path) -> TextFiles:
        """Read the files that exist; all are optional. Raises CheckpointError for a malformed file.

        directory  of the checkpoint; or a GGUF file, whose metadata replaces tokenizer_config and generation_config
        """
        directory = Path(directory)
        if is_gguf(directory):
            tokenizer_config, generation_config = gguf.read_texts(directory)
        else:
            tokenizer_config = _object(directory / "tokenizer_config.json")
            generation_config = _object(directory / "generation_config.json")
        if not tokenizer_config and (directory / tekken.FILE).exists():
            tokenizer_config = {"bos_token": tekken.BOS, "eos_token": tekken.EOS}
        config = _object(directory / "config.json")
        model_type = config.get("model_type")
        added = tokenizer_config.get("added_tokens_decoder")
        if added is None:
            # Only older checkpoints need this file; a newer checkpoint may contain a stale copy.
            tokenizer_config |= _object(directory / "special_tokens_map.json")
        try:
            return cls(
                directory=directory,
                special_tokens=_named(tokenizer_config),
                extra_special=_extra(tokenizer_config),
                added_tokens={int(token_id): dict(token) for token_id, token in (added or {}).items()},
                split_special=bool(tokenizer_config.get("split_special_tokens", False)),
                templates=_templates(directory, tokenizer_config),
                tokenizer_config=tokenizer_config,
                generation_config=generation_config,
                end_ids=_end_ids(generation_config) | _end_ids(config),
                model_type=model_type if isinstance(model_type, str) else "",
            )
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{directory / 'tokenizer_config.json'}: {error!r}") from error


def _object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def _content(token: Any) -> str | None:
    """Return the text of a token that is stored as text or as an object; None for any other value."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    extra = tokenizer_config.get("extra_special_tokens")
    by_role = tokenizer_config | (extra if isinstance(extra, dict) else {})
    roles = [*NAMED_TOKENS, *(role for role in by_role if role.endswith("_token") and role not in NAMED_TOKENS)]
    found = {role: _content(by_role.get(role)) for role in roles}
    return {role: token for role, token in found.items() if token is not None}


def _extra(tokenizer_config: dict[str, Any]) -> tuple[str, ...]:
    extra = tokenizer_config.get("extra_special_tokens") or tokenizer_config.get("additional_special_tokens") or []
    tokens = [_content(token) for token in (extra.values() if isinstance(extra, dict) else extra)]
    return tuple(token for token in tokens if token is not None)


def _templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return templates by name. If any template has a file of its own, those in tokenizer_config.json are ignored."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    try:
        found = {name: read(path).decode() for name, path in files.items() if path.exists()}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{directory}: chat template: {error}") from error
    if found:
        return found
    entry = tokenizer_config.get("chat_template")
    named = {each["name"]: each["template"] for each in entry} if isinstance(entry, list) else entry
    if not isinstance(named, dict):
        return {"default": named} if isinstance(named, str) else {}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise TypeError("chat_template: a name or a template is no text")
    return dict(named)


def _end_ids(config: dict[str, Any]) -> frozenset[int]:
    ids = config.get("eos_token_id")
    return frozenset(end_id for end_id in (ids if isinstance(ids, list) else [ids]) if type(end_id) is int)
