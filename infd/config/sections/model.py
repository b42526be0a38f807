"""Settings of the model: its files and types, pooling, grammars, adapters."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from infd.config.section import Section, about


class ModelConfig(Section, frozen=True, kw_only=True):
    """The model to serve."""

    path: Annotated[
        str,
        about(
            "checkpoint directory, GGUF file, hub id such as org/name or org/name:Q4_K_M, or 'embedded'", flag="--model"
        ),
    ] = "embedded"
    hub: Annotated[Literal["huggingface", "modelscope"], about("hub from which a hub id is fetched", flag="--hub")] = (
        "huggingface"
    )
    revision: Annotated[
        str, about("branch, tag or commit of a hub id (default: the hub's main branch)", flag="--revision")
    ] = ""
    chat_template: Annotated[
        str, about("file with the chat template (default: the checkpoint's)", flag="--chat-template")
    ] = ""
    renderer: Annotated[
        str,
        about(
            "renderer of conversations: hf: the checkpoint's chat template; a family's name: its renderer; auto: the"
            " renderer found from the checkpoint's files (those without a template, and gpt-oss), or the template",
            flag="--renderer",
            alias="--tokenizer-mode",
            values="auto|hf|NAME",
        ),
    ] = "auto"
    tool_parser: Annotated[
        str,
        about(
            "syntax of the model's tool calls, by infd's name or another server's; auto: found in its chat template",
            flag="--tool-parser",
            alias="--tool-call-parser",
            values="auto|none|NAME",
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        about(
            "syntax of the model's thinking, by infd's name or another server's; auto: found in its chat template",
            flag="--reasoning-parser",
            values="auto|none|NAME",
        ),
    ] = "auto"
    served_names: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        about(
            "model names that clients may send; the first is reported (default: from the path)",
            flag="--served-name",
            alias="--served-model-name",
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float", "half"],
        about(
            "type of weights and activations; float is float32, half is float16; auto: the checkpoint's, but on a CPU"
            " bfloat16 or float32, whichever the processor is faster in, and float32 for decoders in float32",
            flag="--dtype",
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8", "mxfp4"],
        about(
            "format into which weights are quantized while loading: smaller and faster, less accurate; as `infd"
            " quantize` quantizes them",
            flag="--quantization",
        ),
    ] = "none"
    quantize_vocabulary: Annotated[
        Literal["auto", "none", "int8", "int4"],
        about(
            "format of embedding and head; auto: int8 on a CPU if the other weights are quantized while loading",
            flag="--quantize-vocabulary",
        ),
    ] = "auto"
    exact_activations: Annotated[
        bool,
        about(
            "compute in the model's dtype although the checkpoint's weights are integers: they are decoded, which takes"
            " more memory and is slower; else activations are quantized: as the checkpoint's scheme says, or to int8",
            flag="--exact-activations",
        ),
    ] = False
    compress: Annotated[
        bool,
        about(
            "keep bfloat16 matrices in 12 bits a weight, without loss, where that speeds decoding up: on a CPU with"
            " AVX512-BF16",
            flag="--no-compress",
        ),
    ] = True
    weights_root: Annotated[
        str,
        about(
            "directory from which `infdctl load-weights` may load (default: the parent of the model's directory)",
            flag="--weights-root",
            live=True,
        ),
    ] = ""
    max_model_len: Annotated[
        Annotated[int, Meta(ge=2)] | None,
        about("longest sequence in tokens, prompt and answer (default: the model's)", flag="--max-model-len"),
    ] = None


class PoolingConfig(Section, frozen=True, kw_only=True):
    """How prompts become embeddings or scores. Unset settings come from the checkpoint's files."""

    task: Annotated[
        Literal["auto", "generate", "embed", "classify"],
        about(
            "task of the model; auto: a model with a language model head generates, unless it has a modules.json as"
            " sentence-transformers writes it; other models pool",
            flag="--task",
            alias="--runner",
        ),
    ] = "auto"
    mode: Annotated[
        Literal["auto", "cls", "lasttoken", "mean", "max", "mean_sqrt_len_tokens", "weightedmean"],
        about("how the hidden states of a prompt become one vector, in sentence-transformers' words", flag="--pooling"),
    ] = "auto"
    normalize: Annotated[
        Literal["auto", "yes", "no"], about("whether embeddings are divided by their length, unless a request says so")
    ] = "auto"
    activation: Annotated[
        Literal["auto", "softmax", "sigmoid", "none"], about("function from the logits of labels to their scores")
    ] = "auto"
    label_tokens: Annotated[
        tuple[str, ...],
        about(
            "tokens whose logits after the prompt are the labels of a model that has no head for labels: no,yes for"
            " Qwen3-Reranker. Of two, the score is that of the second against the first"
        ),
    ] = ()
    step_token: Annotated[
        str,
        about(
            "token that ends a step of an answer, for a model that judges steps: /pooling returns the labels of these"
            " tokens alone; with label_tokens, their logits behind each step. Empty: labels of all tokens, or of the"
            " prompt"
        ),
    ] = ""


class GrammarConfig(Section, frozen=True, kw_only=True):
    """Structured output."""

    engine: Annotated[
        Literal["auto", "llguidance", "xgrammar"],
        about(
            "library that compiles grammars; auto: llguidance; xgrammar is in the extra infd[xgrammar]",
            flag="--grammar-engine",
        ),
    ] = "auto"
    cache_bytes: Annotated[
        Annotated[int, Meta(ge=2**20)], about("memory for compiled grammars; unused ones are evicted")
    ] = 2**28


class LoraConfig(Section, frozen=True, kw_only=True):
    """LoRA adapters, each served under its own model name."""

    modules: Annotated[dict[str, str], about("adapters to load at start: name and PEFT directory", flag="--lora")] = {}
    root: Annotated[
        str,
        about(
            "directory from which `infdctl load-lora` may load; empty: none, or for the embedded model its adapters",
            flag="--lora-root",
            live=True,
        ),
    ] = ""
    max_adapters: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], about("most adapters in device memory; others are swapped in on use")
    ] = 16
    max_adapters_per_step: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], about("most adapters in one step; requests for others wait")
    ] = 16
    host_bytes: Annotated[
        Annotated[int, Meta(ge=2**10)],
        about("host memory for adapters; unused adapters are evicted, and read again on use"),
    ] = 4 * 2**30
