"""Read config.json: check every value's type and range, and name invalid values in errors.

Files on the Hub and files written by transformers 5 name some keys differently, and may omit values that are defaults
of transformers' config classes. `rope_parameters` and `stored_dtype` accept both names; DEFAULTS lists defaults.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infd.errors import CheckpointError
from infd.pooling.causality import GRITLM, is_gritlm
from infd.pooling.reading import CLASSIFIES, LABELS_TOKENS, REWARDS, REWARDS_STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST = 2**24  # above every published dimension; larger dimensions could exhaust memory while shapes are computed
ROPE_THETA = 10_000.0
# Beginnings of the names of architectures whose positions begin behind the padding token's.
BEHIND_PADDING = ("Camembert", "Data2VecText", "Esm", "IBert", "Longformer", "Luke", "Roberta", "XLMRoberta", "Xmod")
MPNET_FIRST = 2  # row of a text's first token in MPNet's table of positions, whatever the padding token's id
HEADS = (REWARDS, REWARDS_STEPS, "Model", CLASSIFIES, LABELS_TOKENS)  # ends of names of classes that only pool

_GEMMA = MappingProxyType(
    {
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
)
_GEMMA3 = MappingProxyType(
    {
        **_GEMMA,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_local_base_freq": 10_000.0,
        "rope_theta": 1_000_000.0,
        "vocab_size": 262_208,
    }
)
_LLAMA4 = MappingProxyType(
    {
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "head_dim": 128,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 16_384,
        "no_rope_layer_interval": 4,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "use_qk_norm": True,
    }
)
_EIGHT_EXPERTS = MappingProxyType({"num_local_experts": 8, "num_experts_per_tok": 2})
# By architecture, defaults of transformers' config class. An explicit null in config.json overrides a default.
DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Ernie4_5_MoeForCausalLM": {
            "moe_intermediate_size": 1536,
            "moe_k": 6,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        },
        "Gemma2ForCausalLM": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "Gemma3ForCausalLM": _GEMMA3,
        "Gemma3ForConditionalGeneration": _GEMMA3,
        "Glm4ForCausalLM": {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
        "Glm4MoeForCausalLM": {
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        "GptOssForCausalLM": {
            "attention_bias": True,
            "head_dim": 64,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
        },
        "GraniteMoeForCausalLM": _EIGHT_EXPERTS,
        "GraniteMoeSharedForCausalLM": _EIGHT_EXPERTS,
        "Llama4ForCausalLM": _LLAMA4,
        "Llama4ForConditionalGeneration": _LLAMA4,
        "GritLM": {"sliding_window": 4096},
        "MistralForCausalLM": {"sliding_window": 4096},
        "MixtralForCausalLM": {**_EIGHT_EXPERTS, "rms_norm_eps": 1e-5},
        "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
        "OlmoeForCausalLM": {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        "Phi3ForCausalLM": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        "PhimoeForCausalLM": {
            "num_experts_per_tok": 2,
            "num_local_experts": 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "router_jitter_noise": 0.01,
        },
        "Qwen2MoeForCausalLM": {
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
        },
        "Qwen3ForCausalLM": {"head_dim": 128},
        "Qwen3MoeForCausalLM": {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    }
)


class Settings:
    """One JSON object of config.json. Methods that return a key's value raise CheckpointError if it is not valid.

    path  prefix of the keys in error messages
    """

    def __init__(self, table: Mapping[str, Any], path: str = "") -> None:
        self._table = table
        self._path = path

    def __contains__(self, key: str) -> bool:
        """Return whether the key has a value; null counts as absent, since transformers writes null for unset keys."""
        return self._table.get(key) is not None

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
        """Return the value of `key`: an integer between `least` and `most`."""
        value = self._get(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.error(key, f"an integer between {least} and {most}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of `key`: a positive, finite number."""
        value = self._get(key, default)
        if not _positive(value):
            raise self.error(key, "a positive number", value)
        return float(value)

    def number_or_none(self, key: str) -> float | None:
        """Return the value of `key`, a positive, finite number; None if the key is absent."""
        return self.number(key) if key in self else None

    def numbers(self, key: str, count: int) -> list[float]:
        """Return the value of `key`: `count` positive, finite numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count or not all(map(_positive, value)):
            raise self.error(key, f"a list of {count} positive numbers", value)
        return value

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """Return the value of `key`: a boolean."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self.error(key, "true or false", value)
        return value

    def string(self, key: str, default: str | None = None) -> str:
        """Return the value of `key`: a string."""
        value = self._get(key, default)
        if type(value) is not str:
            raise self.error(key, "a string", value)
        return value

    def strings(self, key: str) -> list[str]:
        """Return the value of `key`: a list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) is str for item in value):
            raise self.error(key, "a list of strings", value)
        return value

    def integers(self, key: str) -> list[int]:
        """Return the value of `key`: a list of integers from 0 on."""
        value = self._get(key, None)
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(key, "a list of integers", value)
        return value

    def choice(self, key: str, choices: Sequence[str], default: str | None = None) -> str:
        """Return the value of `key`: a member of `choices`."""
        value = self.string(key, default)
        if value not in choices:
            raise self.error(key, " or ".join(map(repr, choices)), value)
        return value

    def table(self, key: str) -> Settings:
        """Return the value of `key`: an object."""
        value = self._get(key, None)
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return Settings(value, f"{self._path}{key}.")

    def over(self, values: Mapping[str, Any]) -> Settings:
        """Return a copy in which `values` replace missing keys; an explicit null is kept."""
        return Settings({**values, **self._table}, self._path)

    def completed(self, absent: Mapping[str, Any], replaced: Mapping[str, Any]) -> Settings:
        """Return a copy in which `absent` replaces missing and null values, and `replaced` overrides all values."""
        stated = {key: value for key, value in self._table.items() if value is not None}
        return Settings({**absent, **stated, **replaced}, self._path)

    def error(self, key: str, expected: str, found: object) -> CheckpointError:
        """Return the error for a wrong value of `key`."""
        return CheckpointError(f"config.json: {self._path}{key}: expected {expected}, found {found!r}")

    def _get(self, key: str, default: object) -> Any:
        value = self._table.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"config.json: {self._path}{key} is missing")
        return value


def _positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")  # type: ignore[operator]


def architecture(config: Mapping[str, Any]) -> str:
    """Return the name of the model's class in transformers. Raises CheckpointError."""
    names = Settings(config).strings("architectures")
    if not names:
        raise CheckpointError("config.json: architectures is empty")
    return names[0]


def language_model(config: Mapping[str, Any]) -> str:
    """Return the name of the model's class with a language model head: Qwen3ForCausalLM for Qwen3Model.

    Other models of a family, without a head or with one for labels, have the same decoder. Raises CheckpointError.
    """
    name = architecture(config)
    if is_gritlm(config):
        return GRITLM
    ending = next((ending for ending in HEADS if name.endswith(ending)), None)
    return name if ending is None else f"{name.removesuffix(ending).removesuffix('Text')}ForCausalLM"


def decoder(config: Mapping[str, Any]) -> Settings:
    """Return the decoder's settings, completed with its architecture's defaults. Raises CheckpointError.

    A multimodal config.json contains the decoder's settings in its object `text_config`.
    """
    settings = Settings(config)
    own = settings.table("text_config") if "text_config" in settings else settings
    return own.over(DEFAULTS.get(language_model(config), {}))


def stored_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype of the checkpoint, for example "bfloat16", or None if config.json states none."""
    settings = Settings(config)
    for key in ("dtype", "torch_dtype"):
        if key in settings:
            return settings.string(key).removeprefix("torch.")
    return None


def head_size(config: Mapping[str, Any]) -> int | None:
    """Return the number of elements of a key head, or None if config.json does not determine it."""
    settings = decoder(config)
    if "head_dim" in settings:
        return settings.integer("head_dim")
    if "hidden_size" in settings and "num_attention_heads" in settings:
        return settings.integer("hidden_size") // settings.integer("num_attention_heads")
    return None


def context_length(config: Mapping[str, Any]) -> int:
    """Return the longest sequence that the model supports, in tokens. Raises CheckpointError.

    yarn extends `original_max_position_embeddings` by its factor, dynamic `max_position_embeddings`. With longrope,
    `max_position_embeddings` is the extended length already.
    """
    settings = decoder(config)
    older = "n_positions" in settings and "max_position_embeddings" not in settings
    length = settings.integer("n_positions" if older else "max_position_embeddings")
    length -= _positions_before(architecture(config), settings)
    rope = rope_parameters(settings)
    if rope.string("rope_type") in ("yarn", "dynamic"):
        trained = {"yarn": "original_max_position_embeddings", "dynamic": "max_position_embeddings"}
        original = rope.integer(trained[rope.string("rope_type")])
        length = max(length, int(original * rope.number("factor", 1.0)))
    return length


def after_padding(settings: Settings) -> int:
    """Return the row of a text's first token in RoBERTa's table of positions, which follows the padding token's."""
    return settings.integer("pad_token_id", 1, least=0) + 1


def _positions_before(name: str, settings: Settings) -> int:
    """Return the rows of the architecture's table of positions that no token has."""
    if name.startswith(BEHIND_PADDING):
        return after_padding(settings)
    return MPNET_FIRST if name.startswith("MPNet") else 0


def is_bounded(config: Mapping[str, Any]) -> bool:
    """Return whether `context_length` is a limit; False for dynamic rope, whose angles adapt to any length."""
    return rope_parameters(decoder(config)).string("rope_type") != "dynamic"


def states_context_length(config: Mapping[str, Any]) -> bool:
    """Return whether config.json states the context length; if not, transformers' config class may have a default."""
    return any(key in decoder(config) for key in ("max_position_embeddings", "n_positions"))


def rope_parameters(settings: Settings, layers: str = "full_attention") -> Settings:
    """Return the rotary settings under transformers 5's keys, with defaults. Raises CheckpointError.

    layers  the layer type whose entry is returned, if `rope_parameters` in config.json has an entry per layer type
    """
    # In Gemma 3 the rope of windowed layers is unscaled.
    local = layers == "sliding_attention" and "rope_local_base_freq" in settings
    outside: dict[str, Any] = {
        "rope_theta": settings.number("rope_local_base_freq" if local else "rope_theta", ROPE_THETA),
        "partial_rotary_factor": settings.number("partial_rotary_factor", 1.0),
    }
    replaced: dict[str, Any] = {}
    if "max_position_embeddings" in settings:
        replaced["max_position_embeddings"] = settings.integer("max_position_embeddings")
        outside["original_max_position_embeddings"] = replaced["max_position_embeddings"]

    rope = Settings({})
    if "rope_parameters" in settings:
        rope = settings.table("rope_parameters")
        rope = rope.table(layers) if layers in rope else rope
    elif "rope_scaling" in settings and not local:
        rope = settings.table("rope_scaling")

    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):  # names of longrope in the first Phi-3 files
        kind = "longrope"
    replaced["rope_type"] = kind
    if "original_max_position_embeddings" in settings:  # Phi-3: overrides the value in rope_scaling, as in transformers
        replaced["original_max_position_embeddings"] = settings.integer("original_max_position_embeddings")
    return rope.completed(outside, replaced)
