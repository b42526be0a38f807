"""Request fields of vLLM, SGLang and llama.cpp that infd recognizes and does not serve yet.

A recognized field is refused by name unless its value changes no answer: ignoring it would return another answer than
the client asked for. infd/http/README.md lists the fields of every API.
"""

from __future__ import annotations

from typing import Any, ClassVar

from infd.http.schema.sampling import GenerationFields
from infd.http.schema.unsupported import ABSENT, UnsupportedField


class PeerFields(GenerationFields, kw_only=True):
    """Fields of chat requests and completion requests to other servers."""

    # vLLM
    ec_transfer_params: UnsupportedField = ABSENT
    guided_decoding_backend: UnsupportedField = ABSENT
    guided_whitespace_pattern: UnsupportedField = ABSENT
    kv_transfer_params: UnsupportedField = ABSENT
    logits_processors: UnsupportedField = ABSENT
    repetition_detection: UnsupportedField = ABSENT
    return_token_offsets: UnsupportedField = ABSENT
    routed_experts_prompt_start: UnsupportedField = ABSENT
    stream_interval: UnsupportedField = ABSENT
    truncation_side: UnsupportedField = ABSENT
    vllm_xargs: UnsupportedField = ABSENT
    watermarking: UnsupportedField = ABSENT

    # SGLang
    bootstrap_host: UnsupportedField = ABSENT
    bootstrap_port: UnsupportedField = ABSENT
    bootstrap_room: UnsupportedField = ABSENT
    custom_logit_processor: UnsupportedField = ABSENT
    custom_params: UnsupportedField = ABSENT
    data_parallel_rank: UnsupportedField = ABSENT
    disagg_prefill_dp_rank: UnsupportedField = ABSENT
    images_config: UnsupportedField = ABSENT
    lora_path: UnsupportedField = ABSENT
    ngram_corpus_id: UnsupportedField = ABSENT
    return_cached_tokens_details: UnsupportedField = ABSENT
    return_hidden_states: UnsupportedField = ABSENT
    routed_dp_rank: UnsupportedField = ABSENT
    routed_experts_start_len: UnsupportedField = ABSENT
    separate_reasoning: UnsupportedField = ABSENT
    session_params: UnsupportedField = ABSENT
    stop_regex: UnsupportedField = ABSENT
    stream_reasoning: UnsupportedField = ABSENT

    # llama.cpp
    grammar_lazy: UnsupportedField = ABSENT  # the grammar applies after a trigger
    lora: UnsupportedField = ABSENT  # adapters by number; in infd `model` names the adapter
    min_keep: UnsupportedField = ABSENT
    n_indent: UnsupportedField = ABSENT
    n_probs: UnsupportedField = ABSENT
    post_sampling_probs: UnsupportedField = ABSENT
    reasoning_format: UnsupportedField = ABSENT
    repeat_last_n: UnsupportedField = ABSENT
    response_fields: UnsupportedField = ABSENT
    return_progress: UnsupportedField = ABSENT
    return_tokens: UnsupportedField = ABSENT
    t_max_predict_ms: UnsupportedField = ABSENT
    timings_per_token: UnsupportedField = ABSENT

    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {
        "ec_transfer_params": ({},),
        "guided_decoding_backend": ("auto",),
        "kv_transfer_params": ({},),
        "logits_processors": ([],),
        "repetition_detection": ({},),
        "return_token_offsets": (False,),
        "routed_experts_prompt_start": (0,),
        "stream_interval": (1,),
        "truncation_side": ("left",),
        "vllm_xargs": ({},),
        "watermarking": (False,),
        "custom_params": ({},),
        "images_config": ({},),
        "return_cached_tokens_details": (False,),
        "return_hidden_states": (False,),
        "routed_experts_start_len": (0,),
        "separate_reasoning": (True,),
        "session_params": ({},),
        "stop_regex": ("", []),
        "stream_reasoning": (True,),
        "grammar_lazy": (False,),
        "lora": ([],),
        "min_keep": (0, 1),
        "n_indent": (0,),
        "n_probs": (0,),
        "post_sampling_probs": (False,),
        "reasoning_format": ("auto", "deepseek"),
        "repeat_last_n": (-1,),
        "response_fields": ([],),
        "return_progress": (False,),
        "return_tokens": (False,),
        "t_max_predict_ms": (-1, 0),
        "timings_per_token": (False,),
    }
