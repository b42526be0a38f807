"""Fill in the middle: the tokens with which families of code models mark the text before and after a gap.

A model is trained for one order of the parts; the families are told apart by the tokens of their vocabularies.

Sources: the model cards and tokenizers of each family; Bavarian et al. 2022 (prefix, suffix, middle); Li et al. 2023
(StarCoder; files of a repository).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from infd.text.tokenizer import Tokenizer


class Family(Struct, frozen=True, kw_only=True):
    """The tokens of one family.

    prefix, suffix  begin the text before and after the gap
    middle          begins the gap's text; None: nothing does
    suffix_first    whether the text after the gap comes first
    repository      begins the name of the repository; None: no token does
    file            begins a file: its name, a line break and its text; None: files are not marked
    ends            further tokens that end the gap's text
    """

    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    repository: str | None = None
    file: str | None = None
    ends: tuple[str, ...] = ()


FAMILIES: Final[dict[str, Family]] = {
    "Qwen2.5-Coder, Qwen3-Coder": Family(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        repository="<|repo_name|>",
        file="<|file_sep|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    ),
    "CodeGemma": Family(
        prefix="<|fim_prefix|>",
        suffix="<|fim_suffix|>",
        middle="<|fim_middle|>",
        file="<|file_separator|>",
        ends=("<|file_separator|>",),
    ),
    "Granite 4": Family(
        prefix="<|fim_prefix|>", suffix="<|fim_suffix|>", middle="<|fim_middle|>", ends=("<|fim_pad|>",)
    ),
    "StarCoder2": Family(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        repository="<repo_name>",
        file="<file_sep>",
        ends=("<fim_pad>", "<repo_name>", "<file_sep>"),
    ),
    "StarCoder, Granite Code": Family(
        prefix="<fim_prefix>",
        suffix="<fim_suffix>",
        middle="<fim_middle>",
        ends=("<fim_pad>", "<filename>", "<reponame>"),
    ),
    "SantaCoder": Family(prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>", ends=("<fim-pad>",)),
    "DeepSeek-Coder": Family(prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>"),
    "CodeLlama": Family(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)),
    "GLM-4": Family(prefix="<|code_prefix|>", suffix="<|code_suffix|>", middle="<|code_middle|>"),
    "Seed-Coder": Family(prefix="<[fim-prefix]>", suffix="<[fim-suffix]>", middle="<[fim-middle]>", suffix_first=True),
    "Codestral": Family(prefix="[PREFIX]", suffix="[SUFFIX]", middle=None, suffix_first=True),
}


class File(Struct, frozen=True):
    """Another file of the repository, which the model reads before the gap's file."""

    name: str
    text: str


class Gap(Struct, frozen=True):
    """A gap to fill.

    prefix  text before the gap, or its token ids
    suffix  text after it
    begun   first part of the gap's text, which the answer continues
    files   other files
    param   request field of the gap, for error messages
    """

    prefix: str | Sequence[int]
    suffix: str
    begun: str = ""
    files: tuple[File, ...] = ()
    param: str = "suffix"

    @property
    def characters(self) -> int:
        """Characters of all texts."""
        prefix = len(self.prefix) if isinstance(self.prefix, str) else 0
        return prefix + len(self.suffix) + len(self.begun) + sum(len(file.name) + len(file.text) for file in self.files)


class Infill:
    """The writer of a model's prompts with gaps.

    end_ids  token ids that end a gap's text, beside the model's own
    """

    def __init__(self, family: Family, tokenizer: Tokenizer) -> None:
        def ids(*tokens: str | None) -> list[int]:
            return [id for token in tokens if token is not None and (id := tokenizer.id_of(token)) is not None]

        self._family = family
        self._encode: Callable[..., list[int]] = tokenizer.encode
        self._newline = tokenizer.id_of("<0x0A>") if tokenizer.drops_space else None
        self._bos = [] if tokenizer.bos is None else ids(tokenizer.bos)
        self._prefix, self._suffix, self._middle = ids(family.prefix), ids(family.suffix), ids(family.middle)
        self._repository, self._file = ids(family.repository), ids(family.file)
        self.end_ids = frozenset(ids(*family.ends))

    @classmethod
    def choose(cls, tokenizer: Tokenizer) -> Infill | None:
        """Return the writer for a tokenizer's family; None: its vocabulary has no family's tokens."""
        for family in FAMILIES.values():
            needed = (family.prefix, family.suffix, family.middle, family.repository, family.file)
            if all(tokenizer.id_of(token) is not None for token in needed if token is not None):
                return cls(family, tokenizer)
        return None

    def prompt(self, gap: Gap) -> list[int]:
        """Return the token ids of a prompt whose answer is the gap's text."""
        prefix = self._prefix + (self._plain(gap.prefix) if isinstance(gap.prefix, str) else [*gap.prefix])
        suffix = self._suffix + self._plain(gap.suffix)
        parts = suffix + prefix if self._family.suffix_first else prefix + suffix
        starts = self._starts_with_bos(gap)
        return [*starts, *self._files(gap.files), *parts, *self._middle, *self._plain(gap.begun)]

    def _starts_with_bos(self, gap: Gap) -> list[int]:
        """Return the token that begins a sequence, if the tokenizer adds it and token ids do not have it already."""
        if not self._bos or self._encode("a")[:1] != self._bos:
            return []
        return [] if not isinstance(gap.prefix, str) and [*gap.prefix[:1]] == self._bos else self._bos

    def _files(self, files: Sequence[File]) -> list[int]:
        """Return other files; where the family marks none, as llama.cpp writes them: each after a comment."""
        found: list[int] = []
        if files and self._repository:
            found += self._repository + self._plain("repository\n")
        for file in files:
            if self._file:
                found += self._file + self._plain(f"{file.name}\n{file.text}")
            else:
                found += self._plain(f"\n\n--- snippet ---\n\n{file.text}")
        if files and self._file:
            found += self._file + self._plain("filename\n")
        return found

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a part, without the space that SentencePiece's tokenizers put before a text."""
        if not text:
            return []
        if self._newline is None:
            return self._encode(text, add_special_tokens=False)
        ids = self._encode("\n" + text, add_special_tokens=False)
        if self._newline not in ids:
            return self._encode(text, add_special_tokens=False)
        return ids[ids.index(self._newline) + 1 :]
