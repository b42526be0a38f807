"""Read how a checkpoint's hidden states are reduced, as sentence-transformers reads its files.

modules.json lists the modules of a sentence-transformers model in order; each has a folder. Without that file
config.json alone decides: an architecture without a head gives embeddings, one with a head for labels gives labels.
Modules and modes that infd does not compute are refused by name, so that no checkpoint gives other numbers than its
authors'.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from infd.errors import CheckpointError
from infd.pooling.causality import GRITLM, is_gritlm, sees_ahead
from infd.pooling.files import (
    CrossEncoder,
    DenseFile,
    Lengths,
    LogitScore,
    ModelConfig,
    Module,
    Reducing,
    Sentences,
    TokenizerFile,
    decode,
)
from infd.pooling.settings import Activation, Dense, DenseActivation, PoolingSettings, Reduction, Similarity
from infd.untrusted import read as read_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MODULES, SENTENCES = "modules.json", "config_sentence_transformers.json"
# Files with max_seq_length and do_lower_case, beside config.json: the first that exists is read.
LENGTHS: Final = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Model types whose head for labels reads the first token, or as classifier_pooling says; others read the last.
ENCODERS: Final = frozenset(
    {
        "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert",
        "layoutlm", "mobilebert", "modernbert", "mpnet", "new", "nomic_bert", "roberta", "roberta-prelayernorm",
        "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
CLASSIFIES, LABELS_TOKENS = "ForSequenceClassification", "ForTokenClassification"
# Ends of the names of Qwen2.5-Math's reward models, of answers and of their steps. Their code, not config.json, states
# the number of labels: one, which is no score of a pair, and two.
REWARDS, REWARDS_STEPS = "ForRewardModel", "ForProcessRewardModel"
# Ends of the names of architectures whose head is not computed: an encoder's hidden states are pooled.
HEADLESS = ("Model", "ForMaskedLM", "ForPreTraining")

# Prompts that every model for embeddings has: empty, unless the checkpoint states them.
PROMPTS = ("query", "document")
EMBED_MARK: Final = "<|embed|>\n"  # follows an instruction of GritLM's
# bge-m3's files beside config.json, and the prefix of the names of their tensors.
M3_FILES: Mapping[str, str] = MappingProxyType(
    {"colbert_linear.pt": "colbert_linear.", "sparse_linear.pt": "sparse_linear."}
)
UNLIMITED = 2**24  # tokens; a length from this on is no limit

Task = Literal["auto", "none", "embed", "classify"]


_REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
        "pooling_mode_lasttoken": "lasttoken",
    }
)
_DENSE_ACTIVATIONS: Mapping[str, DenseActivation] = MappingProxyType(
    {
        "Identity": "none",
        "Tanh": "tanh",
        "GELU": "gelu",
        "ReLU": "relu",
        "Sigmoid": "sigmoid",
        "SiLU": "silu",
    }
)
_SCORES: Mapping[str, Activation] = MappingProxyType({"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"})
_BY_PROBLEM: Mapping[str, Activation] = MappingProxyType(
    {
        "regression": "none",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
)
_SIMILARITIES: Mapping[str, Similarity] = MappingProxyType(
    {"cosine": "cosine", "dot": "dot", "euclidean": "euclidean", "manhattan": "manhattan"}
)


def read(directory: Path, config: Mapping[str, Any], *, task: Task = "auto") -> PoolingSettings:
    """Return the settings of the checkpoint at `directory`; config: the content of its config.json.

    task  what to compute whatever the architecture says: "embed", "classify", or "none": the model generates;
          "auto": a model that generates is pooled only if it has a modules.json, or cannot generate without causality

    Raises CheckpointError, which names the file, if a file is malformed or asks for what infd does not compute.
    """
    if task == "none":
        return PoolingSettings()
    found = decode(config, ModelConfig, Path("config.json"))
    ahead, gritlm = sees_ahead(config), is_gritlm(config)
    settings = _read(directory, found, task, ahead=ahead)
    if gritlm and "embed" in settings.tasks:
        return msgspec.structs.replace(settings, causal=False, pooling="mean", normalize=True, text_mark=EMBED_MARK)
    if "embed" in settings.tasks and found.model_type in ENCODERS:
        settings = _by_token(settings, found.width, directory)
    return msgspec.structs.replace(settings, causal=not ahead) if settings.tasks else settings


def _by_token(settings: PoolingSettings, width: int, directory: Path) -> PoolingSettings:
    """Return the settings with bge-m3's layers for tokens, where their files are in the directory."""

    def layer(name: str, outputs: int) -> Dense | None:
        if not (directory / f"{name}.pt").is_file():
            return None
        return Dense(name=name, inputs=width, outputs=outputs, bias=True, activation="none")

    settings = msgspec.structs.replace(settings, token_dense=layer("colbert_linear", width))
    if (weight := layer("sparse_linear", 1)) is None:
        return settings
    return msgspec.structs.replace(
        settings, tasks=(*settings.tasks, "token_classify"), token_weight=weight, activation="relu"
    )


def _read(directory: Path, found: ModelConfig, task: Task, *, ahead: bool) -> PoolingSettings:
    name = found.architecture
    if task == "classify" or (task == "auto" and name.endswith(CLASSIFIES)):
        return _labels(found, directory, by_token=False)
    if task == "auto" and name.endswith(LABELS_TOKENS):
        return _labels(found, directory, by_token=True)
    if task == "auto" and name.endswith((REWARDS, REWARDS_STEPS)):
        of_steps = name.endswith(REWARDS_STEPS)
        stated = msgspec.structs.replace(found, id2label={}, num_labels=1 + of_steps, problem_type="regression")
        return msgspec.structs.replace(_labels(stated, directory, by_token=of_steps), pairs=False)
    if (path := directory / MODULES).is_file():
        modules = decode(read_file(path), list[Module], path)
        kinds = [module.kind for module in modules]
        return (_by_logits if "LogitScore" in kinds else _embeddings)(modules, found, directory)
    if task == "embed" or name.endswith(HEADLESS) or name == GRITLM or ahead:
        plain = PoolingSettings(
            tasks=("embed", "token_embed"),
            pooling="lasttoken" if name.endswith("ForCausalLM") and not ahead else "mean",
            dimensions=found.width,
            matryoshka=_matryoshka(found),
        )
        return _completed(plain, found, directory)
    return PoolingSettings()


def weight_files(directory: Path) -> dict[str, str]:
    """Return the files of small layers, and what precedes the names of their tensors. Raises CheckpointError.

    They are the files of dense layers that modules.json lists, and bge-m3's.
    """
    files = {name: prefix for name, prefix in M3_FILES.items() if (directory / name).is_file()}
    if (path := directory / MODULES).is_file():
        folders = [_folder(each, path) for each in decode(read_file(path), list[Module], path) if each.kind == "Dense"]
        files |= {_weights(directory, folder): f"{folder}/" for folder in folders}
    return files


def _folder(module: Module, where: Path) -> str:
    """Return a module's folder. Raises CheckpointError if it is not one of the checkpoint's."""
    if Path(module.path).is_absolute() or ".." in Path(module.path).parts:
        raise CheckpointError(f"{where}: {module.path!r} is not a folder of the checkpoint")
    return module.path


def _weights(directory: Path, folder: str) -> str:
    """Return the path of the file of a layer's weights; safetensors are preferred."""
    pickled = f"{folder}/pytorch_model.bin"
    named = f"{folder}/model.safetensors"
    return pickled if (directory / pickled).is_file() and not (directory / named).is_file() else named


def _embeddings(modules: Sequence[Module], config: ModelConfig, directory: Path) -> PoolingSettings:
    """Return the settings of a sentence-transformers model."""
    where = directory / MODULES
    kinds = [module.kind for module in modules]
    if kinds[:1] != ["Transformer"]:
        raise CheckpointError(f"{where}: the first module is {kinds[0] if kinds else 'missing'}, not a Transformer")
    if modules[0].path not in ("", "."):
        raise CheckpointError(
            f"{where}: the weights are in the folder {modules[0].path!r}; move that folder's files beside modules.json,"
            ' and set its "path" to ""'
        )
    pooling: Reducing | None = None
    mode: Reduction = "mean"
    denses: list[Dense] = []
    normalize = False
    width = config.width
    for module in modules[1:]:
        folder = directory / _folder(module, where)
        if module.kind == "Pooling" and pooling is None and not denses and not normalize:
            pooling = decode(read_file(folder / "config.json"), Reducing, folder / "config.json")
            mode = _mode(pooling, folder / "config.json")
            stated = pooling.word_embedding_dimension or pooling.embedding_dimension or width
            if width and stated != width:
                raise CheckpointError(f"{folder / 'config.json'}: pools {stated} elements; config.json states {width}")
            width = stated
        elif module.kind == "Dense" and pooling is not None and not normalize:
            denses.append(_dense(folder, module.path, width))
            width = denses[-1].outputs
        elif module.kind == "Normalize" and pooling is not None:
            normalize = True
        elif module.kind != "Dropout":
            raise CheckpointError(
                f"{where}: module {module.name} is {module.kind}, which infd does not compute at this place; it"
                " computes Transformer, Pooling, any Dense, Normalize, in this order"
            )
    if pooling is None:
        raise CheckpointError(f"{where}: there is no module Pooling")
    return _completed(
        PoolingSettings(
            tasks=("embed", "token_embed"),
            pooling=mode,
            include_prompt=pooling.include_prompt,
            normalize=normalize,
            denses=tuple(denses),
            dimensions=width,
            matryoshka=_matryoshka(config),
        ),
        config,
        directory,
    )


def _mode(pooling: Reducing, where: Path) -> Reduction:
    modes: list[str]
    if pooling.pooling_mode is not None:
        modes = [pooling.pooling_mode] if isinstance(pooling.pooling_mode, str) else pooling.pooling_mode
    else:
        modes = [mode for key, mode in _REDUCTIONS.items() if getattr(pooling, key)]
        if not modes and pooling.pooling_mode_mean_tokens is None:
            modes = ["mean"]
    if len(modes) != 1 or modes[0] not in _REDUCTIONS.values():
        found = ", ".join(modes) or "none"
        raise CheckpointError(
            f"{where}: pooling modes: {found}; infd computes one of {', '.join(_REDUCTIONS.values())}"
        )
    return modes[0]  # type: ignore[return-value]


def _dense(folder: Path, path: str, width: int) -> Dense:
    where = folder / "config.json"
    stated = decode(read_file(where), DenseFile, where)
    name = stated.activation_function.rpartition(".")[2]
    if name not in _DENSE_ACTIVATIONS:
        raise CheckpointError(
            f"{where}: activation_function {name} is not computed; computed: {', '.join(_DENSE_ACTIVATIONS)}"
        )
    if stated.module_input_name != "sentence_embedding" or stated.module_output_name not in (
        None,
        "sentence_embedding",
    ):
        raise CheckpointError(
            f"{where}: the layer reads {stated.module_input_name}; only layers over sentence_embedding are computed"
        )
    if stated.use_residual:
        raise CheckpointError(f"{where}: use_residual is not computed")
    if stated.in_features != width or stated.out_features < 1:
        raise CheckpointError(
            f"{where}: the layer has {stated.in_features} inputs and {stated.out_features} outputs; what comes before"
            f" it has {width} outputs"
        )
    return Dense(
        name=f"{path}/linear",
        inputs=stated.in_features,
        outputs=stated.out_features,
        bias=stated.bias,
        activation=_DENSE_ACTIVATIONS[name],
    )


def _by_logits(modules: Sequence[Module], config: ModelConfig, directory: Path) -> PoolingSettings:
    """Return the settings of a cross-encoder that reads the logits of tokens (sentence-transformers from 5.4 on)."""
    if [module.kind for module in modules] != ["Transformer", "LogitScore"] or modules[0].path not in ("", "."):
        raise CheckpointError(f"{directory / MODULES}: expected a Transformer, at the path '', and a LogitScore")
    where = directory / modules[1].path / "config.json"
    stated = decode(read_file(where), LogitScore, where)
    tokens = (stated.true_token_id,) if stated.false_token_id is None else (stated.false_token_id, stated.true_token_id)
    return _completed(
        PoolingSettings(
            tasks=("classify",),
            pooling="lasttoken",
            dimensions=config.width,
            labels=("LABEL_0",),
            label_tokens=tokens,
            activation=_activation(config, directory, 1),
            pairs=True,
        ),
        config,
        directory,
    )


def _labels(config: ModelConfig, directory: Path, *, by_token: bool) -> PoolingSettings:
    """Return the settings of a model with a head for labels; by_token: each token has labels."""
    labels = _names(config)
    encoder = config.model_type in ENCODERS
    pooling: Reduction = "cls" if encoder else "lasttoken"
    if config.classifier_pooling is not None:
        known: Mapping[str, Reduction] = {"cls": "cls", "bos": "cls", "mean": "mean"}
        if config.classifier_pooling not in known:
            raise CheckpointError(
                f"config.json: classifier_pooling {config.classifier_pooling!r} is not computed;"
                f" computed: {', '.join(known)}"
            )
        pooling = known[config.classifier_pooling]
    return _completed(
        PoolingSettings(
            tasks=("token_classify",) if by_token else ("classify",),
            pooling=pooling,
            dimensions=config.width,
            labels=labels,
            activation="softmax" if by_token else _activation(config, directory, len(labels)),
            pairs=len(labels) == 1 and not by_token,
        ),
        config,
        directory,
    )


def _names(config: ModelConfig) -> tuple[str, ...]:
    stated = config.id2label
    if not stated:
        return tuple(f"LABEL_{index}" for index in range(config.num_labels if config.num_labels is not None else 2))
    if {*stated} != {str(index) for index in range(len(stated))}:
        raise CheckpointError(f"config.json: id2label: expected the labels 0 to {len(stated) - 1}, found {[*stated]}")
    return tuple(stated[str(index)] for index in range(len(stated)))


def _activation(config: ModelConfig, directory: Path, labels: int) -> Activation:
    """Return the activation of a cross-encoder, or of transformers' pipeline for text classification."""
    older = config.sentence_transformers or CrossEncoder()
    stated = _sentences(directory).activation_fn or older.activation_fn or config.sbert_ce_default_activation_function
    if stated is not None:
        name = stated.rpartition(".")[2]
        if name not in _SCORES:
            raise CheckpointError(f"{directory}: activation {name} is not computed; computed: {', '.join(_SCORES)}")
        return _SCORES[name]
    if config.problem_type is not None:
        if config.problem_type not in _BY_PROBLEM:
            raise CheckpointError(
                f"config.json: problem_type: expected one of {', '.join(_BY_PROBLEM)}, found {config.problem_type!r}"
            )
        return _BY_PROBLEM[config.problem_type]
    return "sigmoid" if labels == 1 else "softmax"


def _matryoshka(config: ModelConfig) -> tuple[int, ...]:
    found = tuple(config.matryoshka_dimensions or ())
    if any(each < 1 for each in found):
        raise CheckpointError(f"config.json: matryoshka_dimensions: expected positive integers, found {[*found]}")
    return found


def _completed(settings: PoolingSettings, config: ModelConfig, directory: Path) -> PoolingSettings:
    """Return the settings with prompts, similarity and lengths from the checkpoint's other files."""
    stated, where = _sentences(directory), directory / SENTENCES
    prompts = dict.fromkeys(PROMPTS, "") if "embed" in settings.tasks else {}
    prompts |= {name: text or "" for name, text in (stated.prompts or {}).items()}
    if (default := stated.default_prompt_name) is not None and default not in prompts:
        raise CheckpointError(f"{where}: default_prompt_name {default!r} is not one of {[*prompts]}")
    similarity = _SIMILARITIES.get(stated.similarity_fn_name or "cosine")
    if similarity is None:
        raise CheckpointError(
            f"{where}: similarity_fn_name: expected one of {', '.join(_SIMILARITIES)},"
            f" found {stated.similarity_fn_name!r}"
        )
    most, lower = _lengths(config, directory)
    return msgspec.structs.replace(
        settings, prompts=prompts, default_prompt=default, similarity=similarity, max_tokens=most, lower_case=lower
    )


def _sentences(directory: Path) -> Sentences:
    where = directory / SENTENCES
    return decode(read_file(where), Sentences, where) if where.is_file() else Sentences()


def _lengths(config: ModelConfig, directory: Path) -> tuple[int | None, bool]:
    """Return the tokens to which inputs are truncated, or None, and whether texts are converted to lower case."""
    lengths = Lengths()
    if where := next((directory / name for name in LENGTHS if (directory / name).is_file()), None):
        lengths = decode(read_file(where), Lengths, where)
        if lengths.max_seq_length is not None and lengths.max_seq_length < 1:
            raise CheckpointError(
                f"{where}: max_seq_length: expected a positive integer, found {lengths.max_seq_length}"
            )
    if lengths.max_seq_length is not None:
        return lengths.max_seq_length, lengths.do_lower_case
    limits: list[float] = [config.max_position_embeddings or UNLIMITED]
    if (where := directory / "tokenizer_config.json").is_file():
        limits.append(decode(read_file(where), TokenizerFile, where).model_max_length or UNLIMITED)
    most = min(limits)
    return None if most >= UNLIMITED else max(1, int(most)), lengths.do_lower_case
