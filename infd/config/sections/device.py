"""Settings of the computation: device, steps, cache."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from infd.config.section import Count, NotNegative, Positive, Section, about


class DeviceConfig(Section, frozen=True, kw_only=True):
    """The device that runs the model."""

    kind: Annotated[
        str,
        Meta(pattern=r"^(auto|cpu|cuda(:\d{1,3})?|null)\Z"),
        about(
            "device to run on; 'cuda:1' is the second GPU, 'null' computes nothing",
            flag="--device",
            values="auto|cpu|cuda|cuda:N|null",
        ),
    ] = "auto"
    # Bounded, because libgomp exits the process, without a Python exception, if the system refuses a thread.
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None, about("compute threads on a CPU (default: cores)")
    ] = None
    depth: Annotated[
        Annotated[int, Meta(ge=1, le=8)] | None,
        about("steps in flight (default: 2 on a GPU; 1 on a CPU, 2 while all requests decode)"),
    ] = None
    memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        about("fraction of the GPU memory free at start, for weights, steps and cache together"),
    ] = 0.9
    graphs: Annotated[bool, about("capture decoding steps as CUDA graphs and replay them")] = True
    flashinfer: Annotated[bool, about("prefer FlashInfer's kernels to Triton's on a GPU, where both can be used")] = (
        False
    )
    kernel_cache: Annotated[
        str,
        about(
            "directory of compiled GPU kernels and of calibration.json, the measured step times; remove that file to"
            " measure again (default: kernels in systemd's $CACHE_DIRECTORY, else in"
            " $XDG_CACHE_HOME/infd)"
        ),
    ] = ""
    own_process: Annotated[
        bool, about("run the device in a process of its own; losing that process still ends the daemon")
    ] = False
    null_step_ms: Annotated[NotNegative, about("duration of a step on the null device")] = 0.0


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """How steps are filled."""

    step_tokens: Annotated[Count | None, about("most tokens in one step (default: measured at start)")] = None
    step_target_ms: Annotated[
        Positive | None,
        about(
            "longest step (default: 150 on a CPU, 50 on a GPU; while streams decode and at most 8 prompts wait: 50,"
            " or 1.75 times the shortest step if that is more)"
        ),
    ] = None
    max_num_seqs: Annotated[Count, about("most running sequences", flag="--max-num-seqs")] = 64
    speculative: Annotated[
        Literal["off", "ngram", "suffix"],
        about(
            "guess tokens and verify several in one step where that is faster; answers stay the same; ngram: guess what"
            " followed the last tokens earlier in the request; suffix (recommended): also in earlier answers of the"
            " same tenant; both: the request's prediction, and what its grammar forces",
            flag="--speculative",
        ),
    ] = "off"
    speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=15)], about("most guessed tokens of a request in one step")
    ] = 15
    speculative_bytes: Annotated[
        Annotated[int, Meta(ge=2**20)], about("memory for earlier answers; with speculative suffix")
    ] = 2**26
    max_waiting: Annotated[
        Count, about("most queued choices, then 429, except for tenants that hold less than their share", live=True)
    ] = 4096
    max_waiting_tokens: Annotated[
        Count,
        about("most queued prompt tokens, then 429, except for tenants that hold less than their share", live=True),
    ] = 2**20
    max_routed_bytes: Annotated[
        Count,
        about(
            "most bytes of experts (return_routed_experts) that all answers of more than 64K of these that are computed"
            " or sent may report, then 429",
            live=True,
        ),
    ] = 512 * 2**20
    max_prompt_logprobs_bytes: Annotated[
        Count,
        about(
            "most bytes of the logprobs of prompt tokens in all answers of more than 64K of these that are computed or"
            " sent, counted as limits.prompt_logprobs_bytes counts them, then 429",
            live=True,
        ),
    ] = 512 * 2**20
    max_pooled_bytes: Annotated[
        Count,
        about(
            "most bytes of the numbers of all answers of more than 64K that are computed or sent, counted as"
            " limits.pooled_bytes counts them, then 429",
            live=True,
        ),
    ] = 512 * 2**20
    priority_patience: Annotated[
        Count,
        about(
            "later arrivals that may overtake a request, for each level of priority; half as many a long text to pool"
        ),
    ] = 64


class CacheConfig(Section, frozen=True, kw_only=True):
    """The paged key-value cache."""

    bytes: Annotated[
        Annotated[int, Meta(ge=2**16)] | None,
        about(
            "size of the cache (default: from free memory)", flag="--kv-cache-bytes", alias="--kv-cache-memory-bytes"
        ),
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8", "fp8_e4m3"],
        about(
            "type of cached keys and values; auto: that of activations, the only float type allowed; int8 on a CPU,"
            " fp8 (fp8_e4m3) on a GPU",
            flag="--kv-cache-dtype",
        ),
    ] = "auto"
    page_tokens: Annotated[int, Meta(ge=1, le=1024), about("tokens in one page")] = 16
    prefix_caching: Annotated[bool, about("reuse cached pages between prompts with a common prefix")] = True
    isolation: Annotated[
        Literal["tenant", "none"], about("share cached prefixes within a tenant only, or (none) between all")
    ] = "tenant"
