"""Choose the implementation of each kernel family when the family is first requested.

Candidates are ordered by preference: the first candidate that does not refuse is chosen; earlier refusals are recorded,
with reasons, for operators. Only the chosen implementation's module is imported. The devices and dtypes that a
candidate supports are constants, so that checking them needs no torch; libraries and hardware are detected on this
machine.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from infd.errors import DeviceMissing
from infd.kernels.ops import Choice, Ops, Selected

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch


class Facts(Struct, frozen=True, kw_only=True):
    """The device, dtype and head size that decide whether a candidate refuses.

    head  size of a key head; None: unknown
    """

    device: torch.device
    dtype: torch.dtype
    head: int | None = None


def runs_anywhere(_: Facts) -> None:
    """Return None: the implementation needs no library or hardware that a machine may lack."""


class Candidate(Struct, frozen=True, kw_only=True):
    """One implementation of one family.

    name         shown to operators: the library, and the variant if there are several
    place        "module:Class", imported and called without arguments if chosen; empty: never chosen
    kinds        supported device types; empty: any
    dtypes       names of the supported activation dtypes; empty: any
    cache_dtype  for attention: the float dtype requested for the cache, which must equal the activations' dtype; empty:
                 the cache has the activations' dtype, or the implementation's quantized form
    lacks        returns the reason why this machine cannot run the implementation, or None

    An implementation that delegates some cases records them in its `refused` dict, with reasons.
    """

    name: str
    place: str
    kinds: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    cache_dtype: str = ""
    lacks: Callable[[Facts], str | None] = runs_anywhere

    def called(self, name: str) -> bool:
        """Return whether `name` is the candidate's name, or the first word of the candidate's name."""
        return name in (self.name, self.name.split()[0])

    def unfit(self, kind: str, dtype: str) -> str | None:
        """Return why the candidate does not support this device type and dtype on any machine; None if it does."""
        if self.kinds and kind not in self.kinds:
            return f"runs on {_DEVICES[self.kinds]}, not on {kind}"
        if self.dtypes and dtype not in self.dtypes:
            return f"computes in {' and '.join(self.dtypes)}, not in {dtype}"
        if self.cache_dtype not in ("", dtype):
            return f"caches keys and values in the type that the model computes in, {dtype}"
        return None

    def refuses(self, facts: Facts) -> str | None:
        """Return the reason why the candidate cannot be used, or None."""
        return self.unfit(facts.device.type, _name(facts.dtype)) or self.lacks(facts)


_CPU, _GPU = ("cpu",), ("cuda",)
_DEVICES: Mapping[tuple[str, ...], str] = MappingProxyType({_CPU: "a CPU", _GPU: "a GPU"})
_FLOATS = ("bfloat16", "float32")


def _native(place: str, *dtypes: str, name: str = "native", isa: str | None = None) -> Candidate:
    """isa: the least instruction set whose kernels compute the family; None: all have kernels."""

    def lacks(_: Facts) -> str | None:
        from infd.kernels.cpu.library import why_not

        return why_not(isa)

    return Candidate(name=name, place=f"infd.kernels.cpu.{place}", kinds=_CPU, dtypes=dtypes, lacks=lacks)


def _triton(place: str, name: str = "triton", *, float8: bool = False, heads: bool = False) -> Candidate:
    """heads: check whether the head size fits the GPU's shared memory."""

    def lacks(facts: Facts) -> str | None:
        from infd.kernels.triton.blocks import too_large
        from infd.kernels.triton.presence import FLOAT8, OLDEST, why_not

        reason = why_not(facts.device, FLOAT8 if float8 else OLDEST)
        if reason is None and heads and facts.head is not None:
            return too_large(facts.head, facts.dtype, facts.device)
        return reason

    return Candidate(name=name, place=f"infd.kernels.triton.{place}", kinds=_GPU, lacks=lacks)


def _flashinfer(place: str, name: str = "flashinfer", *, float8: bool = False) -> Candidate:
    def lacks(facts: Facts) -> str | None:
        from infd.kernels.flashinfer.presence import why_not
        from infd.kernels.triton.presence import FLOAT8, OLDEST

        return why_not(facts.device, FLOAT8 if float8 else OLDEST)

    dtypes = ("bfloat16", "float16")
    return Candidate(name=name, place=f"infd.kernels.flashinfer.{place}", kinds=_GPU, dtypes=dtypes, lacks=lacks)


def _without(name: str, kinds: tuple[str, ...], reason: str) -> Candidate:
    """Return the row of a library that cannot compute the family on any machine, for operators."""
    return Candidate(name=name, place="", kinds=kinds, lacks=lambda _: reason)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reference(place: str, name: str = "reference", kinds: tuple[str, ...] = ()) -> Candidate:
    return Candidate(name=name, place=f"infd.kernels.reference.{place}", kinds=kinds)


_PLAIN_ON_GPU = _reference("dense:Matrices", kinds=_GPU)
_DECODED = _reference("dense:Decoded", "reference decoded")
# Decoding reads fewer bytes. Steps of encoders wait for arithmetic, not for memory: they have plain matrices.
COMPRESSED = _native("linear:Compressed", "bfloat16", name="native compressed", isa="avx512_bf16")
_MATRICES = (COMPRESSED, _native("linear:Matrices", "bfloat16"), _reference("dense:Matrices"))

# FlashInfer comes after Triton until both are measured on a GPU; `preferring` can reverse the order.
CANDIDATES: Mapping[str, Sequence[Candidate]] = MappingProxyType(
    {
        "attention": (
            _native("attention:PagedAttention", *_FLOATS),
            _triton("attention:PagedAttention", heads=True),
            _flashinfer("attention:PagedAttention"),
            _reference("attention:PagedAttention"),
        ),
        "span_attention": (
            _native("span_attention:SpanAttention", *_FLOATS),
            _without("flashinfer", _GPU, "it has no biases by distance, and windows on one side only"),
            _triton("span_attention:SpanAttention", heads=True),
            _reference("span_attention:SpanAttention"),
        ),
        "linear": _MATRICES,
        # Layers as one call need forms that native code addresses, also in float32.
        "encoder_linear": (
            _native("linear:Matrices", "bfloat16"),
            _native("linear:Floats", "float32", name="native float32"),
            _reference("dense:Matrices"),
        ),
        "vocabulary": _MATRICES,
        # A vocabulary that is only looked up is stored as rows: in panels a row has two numbers in each cache line.
        "table": (_reference("dense:Matrices"),),
        "packed": (
            _native("packed:Packed", *_FLOATS, name="native packed"),
            # On capability 9 FlashInfer's fp8_blockscale_gemm_sm90 multiplies blocks of 128; torch multiplies them too.
            _without("flashinfer", _GPU, "its products of MXFP8, and of fp8 that torch lacks, need capability 10.0"),
            _triton("float8:Packed", "triton packed"),
            _DECODED,
        ),
        "inputs": (
            _native("inputs:Inputs", *_FLOATS),
            _triton("inputs:Inputs", float8=True),
            _reference("inputs:Inputs"),
        ),
        "norm": (
            _native("tokens:Norm", *_FLOATS),
            _triton("norm:Norm"),
            _flashinfer("tokens:Norm"),
            _reference("dense:Norm"),
        ),
        "rope": (
            _native("tokens:Rope", *_FLOATS),
            _triton("rope:Rope"),
            _flashinfer("tokens:Rope"),
            _reference("dense:Rope"),
        ),
        "activation": (
            _native("tokens:Activation", *_FLOATS),
            _triton("activation:Activation"),
            _flashinfer("tokens:Activation"),
            _reference("dense:Activation"),
        ),
        "experts": (
            _native("experts:Experts", *_FLOATS),
            _triton("experts:Experts"),
            _without("flashinfer", _GPU, "infd does not call its fused experts: none of it was measured on a GPU"),
            _reference("experts:Experts"),
        ),
        "stack": (_native("stack:Stack", *_FLOATS), _reference("dense:Stack")),
        "encoder": (_native("encoder:EncoderStack", *_FLOATS), _reference("dense:Stack")),
        "pooling": (_native("pooling:Pooling", *_FLOATS), _reference("pooling:Pooling")),
        "rows": (_native("rows:RowKernels"), _triton("rows:RowKernels"), _reference("rows:RowKernels")),
        "draw": (_native("draw:Draw", *_FLOATS, "float16"), _triton("draw:Draw"), _reference("drawing.draw:Draw")),
        "lora": (_native("lora:Lora", *_FLOATS), _triton("lora:Lora"), _reference("lora:Lora")),
    }
)


_INT8 = (
    _native("linear:Int8", *_FLOATS, name="native int8"),
    _reference("int8:Matrices", "reference int8", _CPU),
)
_INT4 = (
    _native("groups:Int4", *_FLOATS, name="native int4"),
    _reference("int4:Matrices", "reference int4", _CPU),
)

_FP8 = (
    _native("packed:QuantizedFloat8", "bfloat16", name="native fp8"),
    _triton("float8:QuantizedFloat8", "triton fp8"),
    _reference("float8:Matrices", "reference fp8", _CPU),
)
_MXFP4 = (
    _native("groups:QuantizedMXFP4", *_FLOATS, name="native mxfp4"),
    _reference("mxfp4:Matrices", "reference mxfp4", _CPU),
)

# Candidates for weights that are quantized during loading, by the name of the quantization.
QUANTIZED: Mapping[str, Sequence[Candidate]] = MappingProxyType(
    {"int8": _INT8, "int4": _INT4, "fp8": _FP8, "mxfp4": _MXFP4}
)


# Candidates with model.exact_activations: forms that do not quantize activations.
EXACT: Mapping[str, Sequence[Candidate]] = MappingProxyType(
    {
        "packed": (
            _native("packed:Exact", *_FLOATS, name="native exact"),
            _triton("float8:Packed", "triton packed"),
            _DECODED,
        ),
        "inputs": (_reference("inputs:Unrounded", "exact"),),
    }
)


def quantized(linear: str, vocabulary: str = "auto") -> Mapping[str, Sequence[Candidate]]:
    """Return the candidates for weights that are quantized during loading.

    linear      the layers' matrices: "none" or a key of QUANTIZED
    vocabulary  the embedding and the head: "none", "int8", "int4", or "auto": int8 on a CPU if `linear` is not "none".
                int4 in the vocabulary loses a third as much accuracy as int4 in all layers; int8 loses nothing
                measurable (bench/LOG.md).
    """
    kept = vocabulary_of(linear, vocabulary)
    families = {"linear": linear, "encoder_linear": linear, "vocabulary": kept, "table": kept}
    chosen = {family: QUANTIZED[how] for family, how in families.items() if how != "none"}
    if vocabulary == "auto":
        for family in {"vocabulary", "table"} & chosen.keys():
            *kernels, oracle = chosen[family]
            chosen[family] = (*kernels, _PLAIN_ON_GPU, oracle)
    return {**CANDIDATES, **chosen}


def vocabulary_of(linear: str, vocabulary: str, kind: str = "cpu") -> str:
    """Return the quantization of embedding and head, "none" or a key of QUANTIZED; arguments as in `quantized`.

    kind  of device: "auto" quantizes nothing on a GPU, because no kernel of a GPU multiplies a vocabulary of int8
    """
    if vocabulary != "auto":
        return vocabulary
    return "none" if linear == "none" or kind == "cuda" else "int8"


_FLOAT8: Mapping[str, Sequence[Candidate]] = MappingProxyType(
    {
        "attention": (
            _triton("attention:Float8PagedAttention", "triton fp8", float8=True, heads=True),
            _flashinfer("attention:Float8PagedAttention", "flashinfer fp8", float8=True),
            _reference("attention:Float8PagedAttention", "reference fp8", _CPU),
        ),
        "stack": (_reference("dense:Stack"),),  # the native stack requires native attention
    }
)

# Candidates for the values of cache.dtype.
CACHED: Mapping[str, Mapping[str, Sequence[Candidate]]] = MappingProxyType(
    {
        # A float dtype must equal the activations' dtype: no kernel converts between two float dtypes.
        **{
            dtype: {"attention": tuple(replace(each, cache_dtype=dtype) for each in CANDIDATES["attention"])}
            for dtype in ("float32", "bfloat16", "float16")
        },
        "int8": {
            "attention": (
                _native("attention:Int8PagedAttention", *_FLOATS, name="native int8"),
                _reference("attention:Int8PagedAttention", "reference int8", _CPU),
            )
        },
        **dict.fromkeys(("fp8", "fp8_e4m3"), _FLOAT8),
    }
)


def preferring(name: str, candidates: Mapping[str, Sequence[Candidate]]) -> Mapping[str, Sequence[Candidate]]:
    """Order candidates called `name` before the other candidates of their family. Any candidate may still refuse."""
    return {family: sorted(some, key=lambda each: not each.called(name)) for family, some in candidates.items()}


def insisting(name: str, candidates: Mapping[str, Sequence[Candidate]]) -> Mapping[str, Sequence[Candidate]]:
    """In each family with candidates called `name`, drop the other candidates, and allow any device and dtype.

    The restriction by `cache_dtype` remains.
    """
    return {
        family: [
            replace(each, kinds=(), dtypes=(), lacks=runs_anywhere) for each in some if each.called(name) and each.place
        ]
        or some
        for family, some in candidates.items()
    }


def why_none(candidates: Sequence[Candidate], kind: str, dtype: str) -> str:
    """Return why no candidate supports this device type and dtype; "" if a candidate does."""
    reasons = {each.name: each.unfit(kind, dtype) for each in candidates}
    return "" if None in reasons.values() else "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def select(
    device: torch.device,
    dtype: torch.dtype,
    candidates: Mapping[str, Sequence[Candidate]] = CANDIDATES,
    *,
    head: int | None = None,
) -> Ops:
    """Return ops that choose each family's implementation when the family is first requested.

    dtype  of activations, and of weights and caches that are not quantized
    head   size of a key head; None: unknown

    Requesting a family raises DeviceMissing, with every reason, if all its candidates refuse.
    """
    facts = Facts(device=device, dtype=dtype, head=head)
    return Ops(lambda family: _choose(family, candidates[family], facts))


def _choose(family: str, candidates: Sequence[Candidate], facts: Facts) -> Choice:
    refused: dict[str, str] = {}
    for candidate in candidates:
        reason = candidate.refuses(facts)
        if reason is None:
            module, _, attribute = candidate.place.partition(":")
            implementation = getattr(import_module(module), attribute)()
            delegated: dict[str, str] = getattr(implementation, "refused", {})  # grows as the implementation delegates
            delegated |= refused
            return Choice(implementation, Selected(family, candidate.name, delegated))
        refused[candidate.name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise DeviceMissing(f"no {family} kernel runs on {facts.device} in {facts.dtype}: {reasons}")
