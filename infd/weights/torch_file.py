"""Read a flat dict of tensors as torch.save writes it, without unpickling.

The pickle's instructions are interpreted here, and only those that a flat dict of tensors needs. Names of Python
objects are never looked up: four kinds of names are known, all others are refused. A tensor is a range of the file's
bytes, as one of a safetensors file is.
"""

from __future__ import annotations

import pickletools
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from infd.errors import CheckpointError
from infd.untrusted import WeightsFile
from infd.weights.stored import StoredTensor
from infd.weights.zipped import Range, entries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

MOST_PICKLE_BYTES: Final = 2**20
MOST_DIMENSIONS: Final = 16
MOST: Final = 2**48  # of sizes, strides and offsets, whose products must stay small
DICT, TENSOR = "collections OrderedDict", "torch._utils _rebuild_tensor_v2"
# Class of a storage -> safetensors' name of its numbers, and bytes of a number
STORAGES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "torch FloatStorage": ("F32", 4),
        "torch HalfStorage": ("F16", 2),
        "torch BFloat16Storage": ("BF16", 2),
    }
)
_MARK: Final = object()
_CONSTANTS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "EMPTY_DICT": dict,
        "EMPTY_TUPLE": tuple,
        "MARK": lambda: _MARK,
        "NEWFALSE": lambda: False,
        "NEWTRUE": lambda: True,
        "NONE": lambda: None,
    }
)
# Instructions that push their argument
_LITERALS: Final = frozenset({"BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"})
_TUPLES: Mapping[str, int] = MappingProxyType({"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3})


class Name(NamedTuple):
    """The name of a Python object: its module, a space, its name in the module."""

    name: str


class Storage(NamedTuple):
    """Numbers of one type. dtype: safetensors' name; size: bytes of a number."""

    dtype: str
    size: int
    content: Range


class Placed(NamedTuple):
    """A tensor, from number `first` of a storage on."""

    storage: Storage
    first: int
    shape: tuple[int, ...]


class Refused(Exception):
    """Why a pickle is refused."""


class TorchFile(WeightsFile):
    """An open file of torch.save that holds a flat dict of tensors. `tensors` are in the order of the file."""

    def __init__(self, path: Path) -> None:
        """Open the file and check it completely. Raises CheckpointError, which names the file and the reason."""
        super().__init__(path)
        try:
            self.tensors = self._parse()
        except Refused as error:
            self.close()
            raise CheckpointError(f"{path}: {error}") from None
        except BaseException:
            self.close()
            raise

    def _parse(self) -> list[StoredTensor]:
        found = entries(self)
        pickles = [name for name in found if name.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise Refused("expected one entry data.pkl in a folder, as torch.save writes it")
        root = pickles[0].removesuffix("data.pkl")
        if (order := found.get(f"{root}byteorder")) is not None and self._content(order, 16) != b"little":
            raise Refused("its numbers are not little-endian")
        pickled = self._content(found[pickles[0]], MOST_PICKLE_BYTES)
        storages = {
            name.removeprefix(f"{root}data/"): each for name, each in found.items() if name.startswith(f"{root}data/")
        }
        placed = interpret(pickled, storages)
        tensors = [
            StoredTensor(
                name,
                each.storage.dtype,
                each.shape,
                each.storage.content.offset + each.first * each.storage.size,
                prod(each.shape) * each.storage.size,
                self,
            )
            for name, each in placed.items()
        ]
        return sorted(tensors, key=lambda tensor: (tensor.offset, tensor.name))

    def _content(self, content: Range, most: int) -> bytes:
        if content.size > most:
            raise Refused(f"{content.size} bytes of a pickle; at most {most} are read")
        buffer = bytearray(content.size)
        self.read(memoryview(buffer), content.offset)
        return bytes(buffer)


def interpret(pickled: bytes, storages: Mapping[str, Range]) -> dict[str, Placed]:
    """Return the flat dict of tensors that a pickle describes. storages: by key. Raises Refused.

    Each instruction adds at most one object, and no object is copied, compared or printed, so that memory and time are
    bounded by the pickle's size.
    """
    machine = _Machine(storages)
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "STOP":
                break
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise Refused(f"malformed pickle ({type(error).__name__})") from None
    result = machine.stack[-1] if len(machine.stack) == 1 else None
    if type(result) is not dict or not result:
        raise Refused(f"expected a dict of tensors, found {_kind(result)}")
    for name, value in result.items():
        if type(name) is not str or type(value) is not Placed:
            raise Refused(f"expected a flat dict of tensors, found {_kind(name)} with {_kind(value)}")
    return result


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self, storages: Mapping[str, Range]) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._storages = storages

    def step(self, name: str, argument: Any) -> None:
        """Carry out one instruction. Raises Refused; IndexError and KeyError for a malformed pickle."""
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name == "GLOBAL":
            stack.append(_known(argument))
        elif name == "STACK_GLOBAL":
            module, attribute = self._pop(2)
            stack.append(_known(f"{module} {attribute}" if type(module) is type(attribute) is str else "a name"))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            stack.append(_made(function, arguments))
        elif name == "SETITEM":
            self._set(self._pop(2))
        elif name == "SETITEMS":
            self._set(self._pop_to_mark())
        elif name == "BUILD":  # attributes of the dict, such as the modules' versions
            stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise Refused(f"its pickle has the instruction {name}, which no flat dict of tensors needs")

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise IndexError
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def _pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise Refused(f"its pickle sets items of {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise Refused(f"a key of its dict is {_kind(key)}")
            target[key] = value

    def _storage(self, described: Any) -> Storage:
        if type(described) is not tuple or len(described) != 5:
            raise Refused("its pickle refers to something that is no storage of torch's")
        tag, kind, key, _, count = described
        if type(tag) is not str or tag != "storage" or type(kind) is not Name or kind.name not in STORAGES:
            names = ", ".join(name.rpartition(" ")[2] for name in STORAGES)
            raise Refused(f"its numbers are in {kind.name if type(kind) is Name else _kind(kind)}; known are {names}")
        if type(key) is not str or key not in self._storages:
            raise Refused("a tensor's numbers are missing in the archive")
        dtype, size = STORAGES[kind.name]
        content = self._storages[key]
        if not _is_size(count) or count * size > content.size:
            raise Refused(f"storage {key!r} has more numbers than the {content.size} bytes of the archive's entry hold")
        return Storage(dtype, size, Range(content.offset, count * size))


def _known(name: str) -> Name:
    if name not in (DICT, TENSOR, *STORAGES):
        raise Refused(f"its pickle names {name[:80].replace(' ', '.')}; only dicts of tensors are read")
    return Name(name)


def _made(function: Any, arguments: Any) -> Any:
    """Return the object that a call of a known name constructs. Raises Refused."""
    if type(function) is not Name or type(arguments) is not tuple:
        raise Refused(f"its pickle calls {_kind(function)}")
    if function.name == DICT and not arguments:
        return {}
    if function.name != TENSOR or len(arguments) not in (6, 7):
        raise Refused(f"its pickle calls {function.name.replace(' ', '.')} with {len(arguments)} arguments")
    storage, first, shape, strides = arguments[:4]
    if type(storage) is not Storage or type(shape) is not tuple or type(strides) is not tuple:
        raise Refused("a tensor is malformed")
    numbers = (first, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > MOST_DIMENSIONS or not all(map(_is_size, numbers)):
        raise Refused("a tensor's offset, sizes or strides are no sizes: negative, too large, or of different numbers")
    count = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != count:
            raise Refused(f"a tensor of shape {[*shape]} has strides {[*strides]}; only packed ones are read")
        count *= size
    if first + count > storage.content.size // storage.size:
        raise Refused(f"a tensor of shape {[*shape]} from number {first} on is larger than its storage")
    return Placed(storage, first, shape)


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < MOST


def _kind(value: object) -> str:
    """Return the kind of a pickle's object, which is never printed: it may be much larger than the pickle."""
    return {Name: "a name", Placed: "a tensor", Storage: "a storage", dict: "a dict", tuple: "a tuple"}.get(
        type(value), type(value).__name__
    )
