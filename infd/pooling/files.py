"""The fields that infd reads of sentence-transformers' and transformers' files about pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")


class Module(Struct):
    """An entry of modules.json. type: the class's path in Python, of which the last part is the name."""

    name: str
    path: str
    type: str

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


class Reducing(Struct, kw_only=True):
    """1_Pooling/config.json, as written by sentence-transformers 5 (pooling_mode) and before."""

    word_embedding_dimension: int | None = None
    embedding_dimension: int | None = None
    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool | None = None
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


class DenseFile(Struct, kw_only=True):
    """N_Dense/config.json."""

    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False


class LogitScore(Struct, kw_only=True):
    """N_LogitScore/config.json: a cross-encoder's score is a token's logit, or its odds against another's."""

    true_token_id: Annotated[int, Meta(ge=0)]
    false_token_id: Annotated[int, Meta(ge=0)] | None = None


class Sentences(Struct, kw_only=True):
    """config_sentence_transformers.json."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    activation_fn: str | None = None


class Lengths(Struct, kw_only=True):
    """sentence_bert_config.json."""

    max_seq_length: int | None = None
    do_lower_case: bool = False


class TokenizerFile(Struct, kw_only=True):
    """tokenizer_config.json. transformers writes 1e30 for no limit."""

    model_max_length: float | None = None


class CrossEncoder(Struct, kw_only=True):
    """The table `sentence_transformers` of config.json of a cross-encoder written by releases 4 and 5."""

    activation_fn: str | None = None


class ModelConfig(Struct, kw_only=True):
    """The keys of config.json that matter here."""

    architectures: list[str] = []
    model_type: str = ""
    hidden_size: int | None = None
    dim: int | None = None
    d_model: int | None = None
    n_embd: int | None = None
    id2label: dict[str, str] | None = None
    num_labels: int | None = None
    problem_type: str | None = None
    classifier_pooling: str | None = None
    max_position_embeddings: int | None = None
    matryoshka_dimensions: list[int] | None = None
    sbert_ce_default_activation_function: str | None = None
    sentence_transformers: CrossEncoder | None = None

    @property
    def width(self) -> int:
        return self.hidden_size or self.dim or self.d_model or self.n_embd or 0

    @property
    def architecture(self) -> str:
        return self.architectures[0] if self.architectures else ""


def decode(content: bytes | Mapping[str, Any], kind: type[T], where: Path) -> T:
    """Return a file's content, or an object read from `where`, as a Struct. Raises CheckpointError."""
    try:
        if isinstance(content, bytes):
            return msgspec.json.decode(content, type=kind)
        return msgspec.convert({**content}, kind, str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}") from error
