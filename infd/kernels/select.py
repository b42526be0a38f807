"""Decide once, at start, which implementation of a kernel family this process uses.

Families are asked for by the model, while it is built, and by the runner. Candidates are ordered best first; the first
that does not refuse is chosen, and the reasons of those before it are kept for operators. An implementation's module is
imported only if it is chosen, so that a library for one device costs nothing on another. On which devices and in which
types a candidate computes is data, known without torch; what it lacks here is found out by looking.
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
    """What a candidate may base its refusal on.

    head  how many numbers a head of keys has; None where that is not known
    """

    device: torch.device
    dtype: torch.dtype
    head: int | None = None


def lacks_nothing(_: Facts) -> None:
    """Lack nothing, wherever that is."""


class Candidate(Struct, frozen=True, kw_only=True):
    """One implementation of one family.

    name    as operators see it: whose it is, and in what it differs from their others
    place   "module:Class", imported and called without arguments if chosen
    kinds   of devices that it runs on; empty: any
    dtypes  by name, that the model may compute in; empty: any
    keeps   of attention: the type that its cache is asked for in, of which it keeps only the one that the model
            computes in; empty: whichever that is, or one that is of its own making
    lacks   returns what is missing for it here, or None

    What leaves some of its work to another one has `refused`, a dict, and says there what it left, and why.
    """

    name: str
    place: str
    kinds: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    keeps: str = ""
    lacks: Callable[[Facts], str | None] = lacks_nothing

    def called(self, name: str) -> bool:
        """Say whether that is its name, whole or the first word."""
        return name in (self.name, self.name.split()[0])

    def unfit(self, kind: str, dtype: str) -> str | None:
        """Return why it never computes in that type on that kind of device, or None."""
        if self.kinds and kind not in self.kinds:
            return f"runs on {_DEVICES[self.kinds]}, not on {kind}"
        if self.dtypes and dtype not in self.dtypes:
            return f"computes in {' and '.join(self.dtypes)}, not in {dtype}"
        if self.keeps not in ("", dtype):
            return f"keeps keys and values in the type that the model computes in, {dtype}"
        return None

    def refuses(self, facts: Facts) -> str | None:
        """Return why it cannot be used here, or None."""
        return self.unfit(facts.device.type, _name(facts.dtype)) or self.lacks(facts)


_CPU, _GPU = ("cpu",), ("cuda",)
_DEVICES: Mapping[tuple[str, ...], str] = MappingProxyType({_CPU: "a CPU", _GPU: "a GPU"})
_FLOATS = ("bfloat16", "float32")


def _native(place: str, *dtypes: str, name: str = "native") -> Candidate:
    def lacks(_: Facts) -> str | None:
        from infd.kernels.cpu.library import why_not

        return why_not()

    return Candidate(name=name, place=f"infd.kernels.cpu.{place}", kinds=_CPU, dtypes=dtypes, lacks=lacks)


def _triton(place: str, name: str = "triton", *, float8: bool = False, heads: bool = False) -> Candidate:
    """heads: whether heads must fit into what a program may hold"""

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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _reference(place: str, name: str = "reference", kinds: tuple[str, ...] = ()) -> Candidate:
    return Candidate(name=name, place=f"infd.kernels.reference.{place}", kinds=kinds)


# FlashInfer's stand behind Triton's until both were measured on a GPU; who wants them turns that round (`preferring`).
CANDIDATES: Mapping[str, Sequence[Candidate]] = MappingProxyType(
    {
        "attention": (
            _native("attention:PagedAttention", *_FLOATS),
            _triton("attention:PagedAttention", heads=True),
            _flashinfer("attention:PagedAttention"),
            _reference("attention:PagedAttention"),
        ),
        "linear": (_native("linear:Matrices", "bfloat16"), _reference("dense:Matrices")),
        "vocabulary": (_native("linear:Matrices", "bfloat16"), _reference("dense:Matrices")),
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
        "stack": (_native("stack:Stack", "bfloat16"), _reference("dense:Stack")),
        "rows": (_triton("rows:Rows"), _reference("rows:Rows")),
        "draw": (_native("draw:Draw", *_FLOATS, "float16"), _triton("draw:Draw"), _reference("drawing.draw:Draw")),
        "lora": (_native("lora:Lora", *_FLOATS), _triton("lora:Lora"), _reference("lora:Lora")),
    }
)


_INT8 = (
    _native("linear:Int8", *_FLOATS, name="native int8"),
    _reference("int8:Matrices", "reference int8", _CPU),
)
_INT4 = (
    _native("linear:Int4", *_FLOATS, name="native int4"),
    _reference("int4:Matrices", "reference int4", _CPU),
)

# The forms of weights that are quantized while they are loaded.
QUANTIZED: Mapping[str, Sequence[Candidate]] = MappingProxyType({"int8": _INT8, "int4": _INT4})


def quantized(linear: str, vocabulary: str = "auto") -> Mapping[str, Sequence[Candidate]]:
    """Return the candidates for weights that are quantized while they are loaded.

    linear      what layers' matrices become: "none" or a key of QUANTIZED
    vocabulary  likewise the embedding and the head; "auto": as layers, but int8 where those are int4. Four bits here
                cost a third of what they cost in all layers, eight nothing that can be told (bench/LOG.md).
    """
    families = {"linear": linear, "vocabulary": vocabulary_of(linear, vocabulary)}
    return {**CANDIDATES, **{family: QUANTIZED[how] for family, how in families.items() if how != "none"}}


def vocabulary_of(linear: str, vocabulary: str) -> str:
    """Return what the embedding and the head become, "none" or a key of QUANTIZED; arguments as of `quantized`."""
    if vocabulary != "auto":
        return vocabulary
    return "int8" if linear == "int4" else linear


_FLOAT8: Mapping[str, Sequence[Candidate]] = MappingProxyType(
    {
        "attention": (
            _triton("attention:Float8PagedAttention", "triton fp8", float8=True, heads=True),
            _flashinfer("attention:Float8PagedAttention", "flashinfer fp8", float8=True),
            _reference("attention:Float8PagedAttention", "reference fp8", _CPU),
        ),
        "stack": (_reference("dense:Stack"),),  # the native one would want native attention
    }
)

# What attention keeps in the cache, as cache.dtype calls it.
CACHED: Mapping[str, Mapping[str, Sequence[Candidate]]] = MappingProxyType(
    {
        # The model's own type by its name: nothing is quantized, and no kernel keeps another one.
        **{
            dtype: {"attention": tuple(replace(each, keeps=dtype) for each in CANDIDATES["attention"])}
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
    """Put the candidate of that name, or first word, before all others of its family. It may still refuse."""
    return {family: sorted(some, key=lambda each: not each.called(name)) for family, some in candidates.items()}


def insisting(name: str, candidates: Mapping[str, Sequence[Candidate]]) -> Mapping[str, Sequence[Candidate]]:
    """Leave the families that have a candidate of that name, or first word, no other, whatever it would refuse here."""
    return {
        family: [replace(each, kinds=(), dtypes=(), lacks=lacks_nothing) for each in some if each.called(name)] or some
        for family, some in candidates.items()
    }


def why_none(candidates: Sequence[Candidate], kind: str, dtype: str) -> str:
    """Return why none of a family's candidates computes in that type on that kind of device; empty where one does."""
    reasons = {each.name: each.unfit(kind, dtype) for each in candidates}
    return "" if None in reasons.values() else "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def select(
    device: torch.device,
    dtype: torch.dtype,
    candidates: Mapping[str, Sequence[Candidate]] = CANDIDATES,
    *,
    head: int | None = None,
) -> Ops:
    """Return ops that choose each family's implementation when it is asked for.

    dtype  of weights, activations and cache
    head   see Facts

    Asking raises DeviceMissing, with every reason, where all candidates of a family refuse.
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
            told: dict[str, str] = getattr(implementation, "refused", {})  # it goes on saying there what it leaves
            told |= refused
            return Choice(implementation, Selected(family, candidate.name, told))
        refused[candidate.name] = reason
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
    raise DeviceMissing(f"no {family} kernel runs on {facts.device} in {facts.dtype}: {reasons}")
