"""Match an adapter's tensors to the model's adaptable modules.

Unknown and unpaired tensors, and wrong shapes, types and ranks, are found from the
file's header, before weights are read, and reported together in one error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from infd.adapters.peft import MOST_RANK
from infd.errors import CheckpointError
from infd.weights.formats.plain import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infd.adapters.peft import PeftConfig
    from infd.weights.checkpoint import TensorFile
    from infd.weights.stored import StoredTensor

PROBLEMS_SHOWN = 10
PREFIX = "base_model.model."
# Prefixes of the names of the decoder's modules in different versions of transformers, longest first.
ROOTS = ("language_model.model.", "model.language_model.", "language_model.", "model.")
# Prefixes of the names of encoders' modules, which headless checkpoints lack.
ENCODER_ROOTS = ("bert.", "distilbert.", "electra.", "gte.", "mpnet.", "new.", "nomic_bert.", "roberta.", "")
# PEFT's suffixes of the factors A and B: for weight matrices, then for embedding tables.
FACTORS = ((".lora_A.weight", ".lora_B.weight"), (".lora_embedding_A", ".lora_embedding_B"))
# PEFT's suffix of the frozen base weight.
ORIGINAL = ".base_layer.weight"
NESTED = ".base_layer"  # PEFT's name of the layer that it wraps
_WHOLE = (
    "a whole tensor (modules_to_save, or a larger vocabulary); infd adds only low-rank products, and replaces layers"
    " after pooling that modules_to_save names"
)
_REFUSED = {
    ".lora_magnitude_vector": "DoRA",
    ".lora_magnitude_vector.weight": "DoRA",
    ".lora_A.bias": "a bias",
    ".lora_B.bias": "a bias",
    ".trainable_tokens_delta": "trained tokens",
    ".bias": "a bias",
    ".weight": _WHOLE,
}


class Target(Protocol):
    """An adaptable matrix or embedding table of the model; see models/parameter.py.

    modules  checkpoint modules fused in the target, with each module's number of outputs
    inputs   number of inputs of the weight matrix, or of rows of the embedding table
    table    whether the target is an embedding table
    whole    whether an adapter may have the target's weight, and if `bias` its bias, as a whole
    experts  number of experts with such a matrix; 0: one matrix
    stacked  of experts, the names of the parameter that stacks their matrices
    alternating  whether the rows of two modules alternate in that parameter
    transposed   whether transformers stores the matrices of that parameter as [inputs, outputs]
    """

    @property
    def modules(self) -> Mapping[str, int]: ...
    @property
    def inputs(self) -> int: ...
    @property
    def table(self) -> bool: ...
    @property
    def whole(self) -> bool: ...
    @property
    def bias(self) -> bool: ...
    @property
    def experts(self) -> int: ...
    @property
    def stacked(self) -> tuple[str, ...]: ...
    @property
    def alternating(self) -> bool: ...
    @property
    def transposed(self) -> bool: ...


class Change(Struct, frozen=True):
    """An adapter's low-rank update of one module: W + scale * b @ a.

    a, b    stored factors, [rank, inputs] and [outputs, rank]
    output  index of the module's first output in the target
    expert  whose matrix is changed; None: the only one, or if the target has experts, those of all

    The factors for all of E experts are [E * rank, inputs], expert after expert, and [outputs, rank * E], in which the
    experts' columns alternate.

    turned  whether they are [E * rank, outputs] and [inputs, rank * E]: PEFT takes the parameter's second dimension for
            the inputs or for the outputs, which depends on its version and on the model
    """

    module: str
    a: StoredTensor
    b: StoredTensor
    rank: int
    scale: float
    output: int
    expert: int | None = None
    turned: bool = False


class Own(Struct):
    """An adapter's own weight and bias of a layer."""

    weight: StoredTensor | None = None
    bias: StoredTensor | None = None


class Fitted(NamedTuple):
    """What an adapter changes: modules by low-rank updates, and layers that it has as a whole."""

    changes: dict[Target, list[Change]]
    own: dict[Target, Own]


class _Place(Struct, frozen=True):
    target: Target
    outputs: int
    output: int
    expert: int | None = None


class _Stack(Struct, frozen=True):
    """A parameter that stacks the matrices of all experts."""

    name: str
    target: Target

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs of a matrix."""
        return self.target.inputs, sum(self.target.modules.values())


def fit(config: PeftConfig, file: TensorFile, targets: Sequence[Target]) -> Fitted:
    """Return the adapter's changes by target, in the order of `targets`.

    Raises CheckpointError, which lists the faults, at most PROBLEMS_SHOWN.
    """
    places: dict[str, _Place] = {}
    stacks: dict[str, list[_Stack]] = {}  # by the name of the parameter's module
    for target in targets:
        output = 0
        for module, outputs in target.modules.items():
            if target.experts:
                for expert in range(target.experts):
                    places[_bare(module.format(expert))] = _Place(target, outputs, output, expert)
            else:
                places[_bare(module)] = _Place(target, outputs, output)
            output += outputs
        for name in target.stacked:
            stacks.setdefault(_bare(name.rpartition(".")[0]), []).append(_Stack(name, target))
    problems: list[str] = []
    stored = {tensor.name: tensor for tensor in file.tensors}
    own = _own(config, stored, places)
    for target, each in own.items():
        problems += _own_faults(target, each)
    kept = {tensor.name for each in own.values() for tensor in (each.weight, each.bias) if tensor is not None}
    stored = {name: tensor for name, tensor in stored.items() if name not in kept}
    found: dict[Target, list[Change]] = {}
    pairs = list(_pairs(stored, places, stacks, problems))
    turned = _known_turns(pairs, stacks)
    for module, a, b in pairs:
        place = places.get(_bare(module))
        if place is None:
            change = _stacked_change(config, module, a, b, stacks[_bare(_unnested(module))], turned)
            if isinstance(change, str):
                problems.append(change)
            else:
                target, whole = change
                found.setdefault(target, []).append(whole)
            continue
        wrong = list(_faults(config, module, a, b, place))
        problems += wrong
        if not wrong:
            rank = b.shape[1]
            scale = config.scale(module, rank)
            found.setdefault(place.target, []).append(Change(module, a, b, rank, scale, place.output, place.expert))
    problems += [
        f"{changes[0].a.name}: the experts are changed twice"
        for target, changes in found.items()
        if len(changes) > 1 and target.experts and any(change.expert is None for change in changes)
    ]
    if not problems:
        changed = [change.module for changes in found.values() for change in changes]
        problems += [f"{named}, which the file does not hold" for named in config.unmet(changed)]
        if config.modules_to_save and not own:
            names = ", ".join(config.modules_to_save)
            problems.append(f"modules_to_save names {names}, which the file does not hold")
        if not changed:
            problems.append("the file holds no adapter")
    if problems:
        made_for = f" (made for {config.base_model_name_or_path})" if config.base_model_name_or_path else ""
        more = [f"and {len(problems) - PROBLEMS_SHOWN} more"] if len(problems) > PROBLEMS_SHOWN else []
        does_not_fit = f"{file.path}{made_for} does not fit this model:"
        raise CheckpointError("\n  ".join([does_not_fit, *problems[:PROBLEMS_SHOWN], *more]))
    changes = {target: sorted(found[target], key=lambda change: change.output) for target in targets if target in found}
    return Fitted(changes, own)


def _own(config: PeftConfig, stored: Mapping[str, StoredTensor], places: Mapping[str, _Place]) -> dict[Target, Own]:
    """Return the layers that the adapter has as a whole."""
    found: dict[Target, Own] = {}
    for name, tensor in stored.items():
        module, _, part = name.removeprefix(PREFIX).rpartition(".")
        place = places.get(_bare(module))
        if place is not None and place.target.whole and part in ("weight", "bias") and config.saves(module):
            setattr(found.setdefault(place.target, Own()), part, tensor)
    return found


def _own_faults(target: Target, own: Own) -> Iterator[str]:
    ((module, outputs),) = target.modules.items()
    expected: dict[str, tuple[StoredTensor | None, tuple[int, ...]]] = {
        "weight": (own.weight, (outputs, target.inputs))
    }
    expected |= {"bias": (own.bias, (outputs,))} if target.bias or own.bias is not None else {}
    for part, (tensor, shape) in expected.items():
        if tensor is None:
            yield f"{module}.{part}: missing, although modules_to_save names the module"
        elif tensor.shape != shape or (part == "bias" and not target.bias):
            yield f"{tensor.name}: expected {[*shape]}, found {[*tensor.shape]}"
        elif tensor.dtype not in DTYPES:
            yield f"{tensor.name}: expected one of {', '.join(DTYPES)}, found {tensor.dtype}"


def _pairs(
    stored: Mapping[str, StoredTensor],
    places: Mapping[str, _Place],
    stacks: Mapping[str, list[_Stack]],
    problems: list[str],
) -> Iterator[tuple[str, StoredTensor, StoredTensor]]:
    """Yield (module, A, B) for each pair of factors.

    Appends a problem for each tensor that belongs to no pair and is not a base weight.
    """
    for name, tensor in stored.items():
        inner = name.removeprefix(PREFIX)
        module, first, second = _split(inner)
        if first:
            place = places.get(_bare(module))
            other = stored.get(f"{name.removesuffix(first)}{second}")
            known = _bare(_unnested(module)) in stacks if place is None else not place.target.whole
            if not known:
                problems.append(f"{name}: this model has no module {module} that adapters may change")
            elif other is None:
                problems.append(f"{name}: there is no {second.removeprefix('.')} beside it")
            elif (table := place is not None and place.target.table) != ("embedding" in first):
                problems.append(f"{name}: {module} is {'a table' if table else 'a product'} here")
            elif first in (FACTORS[0][0], FACTORS[1][0]):
                yield module, tensor, other
        elif not _is_original(inner, tensor, places):
            problems.append(f"{name}: {_why_refused(inner)}")


def _split(name: str) -> tuple[str, str, str]:
    """Return (module, suffix, suffix of the other factor) for the name of a factor; empty strings for other names."""
    for a, b in FACTORS:
        for ending, other in ((a, b), (b, a)):
            if name.endswith(ending):
                return name.removesuffix(ending), ending, other
    return "", "", ""


def _is_original(name: str, tensor: StoredTensor, places: Mapping[str, _Place]) -> bool:
    """Return whether a tensor has the name and shape of a frozen base weight.

    PEFT saves the base weight of an adapted embedding with the adapter.
    """
    place = places.get(_bare(name.removesuffix(ORIGINAL)))
    if not name.endswith(ORIGINAL) or place is None:
        return False
    rows = place.target.inputs if place.target.table else place.outputs
    columns = place.outputs if place.target.table else place.target.inputs
    return tensor.shape == (rows, columns)


def _why_refused(name: str) -> str:
    if name.endswith(ORIGINAL):
        return f"a base weight of another shape than this model's; {_WHOLE}"
    return next((reason for ending, reason in _REFUSED.items() if name.endswith(ending)), "left over")


def _faults(config: PeftConfig, module: str, a: StoredTensor, b: StoredTensor, place: _Place) -> Iterator[str]:
    rank = b.shape[1] if len(b.shape) == 2 else 0
    for tensor, expected in ((a, (rank, place.target.inputs)), (b, (place.outputs, rank))):
        if tensor.shape != expected or not rank:
            shape = [size if size else "rank" for size in expected]
            yield f"{tensor.name}: expected {shape}, found {list(tensor.shape)}"
            return
    yield from _common_faults(config, module, a, b, rank)
    if not config.targets(module):
        yield f"{module}: left over, since target_modules does not name it"


def _common_faults(config: PeftConfig, name: str, a: StoredTensor, b: StoredTensor, rank: int) -> Iterator[str]:
    """Yield the faults in dtype, numbers or rank of factors of fitting shapes."""
    for tensor in (a, b):
        if tensor.dtype not in DTYPES:
            yield f"{tensor.name}: expected one of {', '.join(DTYPES)}, found {tensor.dtype}"
            return
    if rank > MOST_RANK:
        yield f"{name}: rank {rank}; infd computes ranks up to {MOST_RANK}"
    elif rank != config.rank(name):
        yield f"{name}: rank {rank}; the config says {config.rank(name)}"


def _turns(a: StoredTensor, b: StoredTensor, stack: _Stack) -> list[bool]:
    """Return the values that Change.turned may have, if factors of these shapes change the parameter: two if square."""
    ranks = a.shape[0] if len(a.shape) == 2 else 0
    if not ranks or ranks % stack.target.experts:
        return []
    inputs, outputs = stack.sizes
    ways = ((False, (inputs, outputs)), (True, (outputs, inputs)))
    return [turned for turned, (columns, rows) in ways if a.shape == (ranks, columns) and b.shape == (rows, ranks)]


def _known_turns(
    pairs: Sequence[tuple[str, StoredTensor, StoredTensor]], stacks: Mapping[str, list[_Stack]]
) -> frozenset[bool]:
    """Return the values of Change.turned of the parameters whose matrices are not square. A file's are all alike."""
    possible = (_turns(a, b, stack) for module, a, b in pairs for stack in stacks.get(_bare(_unnested(module)), ()))
    return frozenset(turns[0] for turns in possible if len(turns) == 1)


def _stacked_change(
    config: PeftConfig,
    module: str,
    a: StoredTensor,
    b: StoredTensor,
    stacks: Sequence[_Stack],
    known: frozenset[bool],
) -> tuple[Target, Change] | str:
    """Return the change that factors make to one of the parameters `stacks` of a module, or their fault in words.

    The file does not name the parameter; the shapes of the factors tell it. If its matrices are square, `known` says
    whether factors are turned, see `_known_turns`; else PEFT's version does.
    """
    for stack in stacks:
        turns = _turns(a, b, stack)
        if not turns:
            continue
        rank = a.shape[0] // stack.target.experts
        if wrong := next(_stack_faults(config, stack.name, a, b, rank), None):
            return wrong
        turned = turns[0] if len(turns) == 1 else next(iter(known)) if len(known) == 1 else None
        if turned is None:
            turned = config.turned(transposed=stack.target.transposed)
        if turned is None:
            return (
                f"{a.name}: the matrices of {stack.name} are square, so shapes do not tell which factor multiplies the"
                f" inputs. PEFT's version and the model do, but not peft_version {config.peft_version or 'missing'}"
            )
        scale = config.scale(stack.name, rank)
        return stack.target, Change(stack.name, a, b, rank, scale, 0, turned=turned)
    expected = " or ".join(
        f"[{stack.target.experts} x rank, {stack.sizes[0]}] and [{stack.sizes[1]}, {stack.target.experts} x rank] of"
        f" {stack.name.rpartition('.')[2]}"
        for stack in stacks
    )
    return f"{a.name}: expected {expected}, found {list(a.shape)} and {list(b.shape)}"


def _stack_faults(config: PeftConfig, name: str, a: StoredTensor, b: StoredTensor, rank: int) -> Iterator[str]:
    yield from _common_faults(config, name, a, b, rank)
    if not config.targets_parameter(name):
        yield f"{name}: left over, since target_parameters does not name it"


def _unnested(module: str) -> str:
    """Return the module that has a parameter, which PEFT wraps again for each further parameter."""
    while module.endswith(NESTED):
        module = module.removesuffix(NESTED)
    return module


def _bare(module: str) -> str:
    """Return a module's name without its prefix, which depends on the version of transformers."""
    return module.removeprefix(next(root for root in (*ROOTS, *ENCODER_ROOTS) if module.startswith(root)))
