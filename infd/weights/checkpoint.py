"""Read a checkpoint without trusting its files.

Safetensors headers are parsed and checked completely (sizes, offsets, overlaps,
gaps) before weights are read; so are GGUF headers (`infd/gguf`), and the archives of torch.save that a few models have
for small layers (`torch_file.py`). No file is mapped or unpickled; tensors are read into buffers, in stored order.
"""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from infd.errors import CheckpointError
from infd.gguf import SUFFIX, is_gguf
from infd.gguf import config as gguf_config
from infd.gguf import file as gguf_file
from infd.pooling import weight_files
from infd.rounding import ceil_div
from infd.untrusted import Root, WeightsFile, read
from infd.weights.encodings import find, gguf
from infd.weights.stored import EncodedTensor, StoredTensor
from infd.weights.torch_file import TorchFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from infd.weights.encodings.find import Contents

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # maps tensors to files of a sharded checkpoint
MODELOPT = "hf_quant_config.json"  # quantization config of older ModelOpt checkpoints, whose config.json has none
# Maximum bytes of a header: several times the largest known header. Parsing the largest header that the format allows
# would take gigabytes of memory.
HEADER_BYTES = 2**25

_COUNTED = re.compile(r"(\D*)(\d*)")

BITS = MappingProxyType({
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
    "F4": 4,
})  # fmt: skip


_Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Entry(Struct):
    """A tensor's entry in a safetensors header."""

    dtype: str
    shape: Annotated[list[_Size], Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]


class TensorFile(WeightsFile):
    """An open safetensors file whose header has been checked. `tensors` are in stored order."""

    def __init__(self, path: Path) -> None:
        """Open the file and check its header.

        Raises CheckpointError, which names the file and, if one tensor is at fault, the tensor.
        """
        super().__init__(path)
        try:
            self.tensors = self._parse()
        except BaseException:
            self.close()
            raise

    def _parse(self) -> list[StoredTensor]:
        size = self.size()
        if size < 8:
            raise CheckpointError(f"{self.path}: expected a safetensors file, found {size} bytes")
        length = int.from_bytes(self._bytes(8, 0), "little")
        if length > min(size - 8, HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: the header claims {length} bytes; the file has {size - 8} left,"
                f" and at most {HEADER_BYTES} are read"
            )
        first = 8 + length
        try:
            header = self._bytes(length, 8)
            entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            described = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in entries.items()}
            if any(header.count(b'"%b"' % field.encode()) != len(described) for field in _Entry.__struct_fields__):
                json.loads(header, object_pairs_hook=self._once)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: json, for very long integers
            raise CheckpointError(f"{self.path}: malformed header: {error}") from error
        tensors = [self._tensor(name, entry, first) for name, entry in described.items()]
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.bytes))
        end = first
        for tensor in tensors:
            if tensor.offset != end:
                fault = (
                    "overlaps the previous tensor" if tensor.offset < end else "leaves a gap after the previous tensor"
                )
                raise CheckpointError(f"{self.path}: {tensor.name}: {fault}")
            end += tensor.bytes
        if end != size:
            raise CheckpointError(f"{self.path}: the header describes {end} bytes, the file has {size}")
        return tensors

    def _once(self, pairs: list[tuple[str, Any]]) -> None:
        """Raise CheckpointError if a key of a JSON object in the header occurs twice: msgspec takes the last one."""
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise CheckpointError(f"{self.path}: {key} occurs twice in the header")
            seen.add(key)

    def _tensor(self, name: str, entry: _Entry, first: int) -> StoredTensor:
        begin, end = entry.data_offsets
        bits = BITS.get(entry.dtype)
        if bits is None:
            raise CheckpointError(f"{self.path}: {name}: unknown dtype {entry.dtype!r}")
        expected = prod(entry.shape) * bits
        if (end - begin) * 8 != expected:
            raise CheckpointError(
                f"{self.path}: {name}: {entry.dtype} {entry.shape} takes {ceil_div(expected, 8)} bytes,"
                f" its offsets [{begin}, {end}] hold {end - begin}"
            )
        return StoredTensor(name, entry.dtype, tuple(entry.shape), first + begin, end - begin, self)

    def _bytes(self, count: int, offset: int) -> bytearray:
        content = bytearray(count)
        self.read(memoryview(content), offset)
        return content


class Checkpoint:
    """An open checkpoint, and a context manager that closes it.

    directory  path of the checkpoint's directory or GGUF file
    config     content of config.json; for a GGUF file, made from its metadata
    tensors    tensors by name; an encoded matrix is one EncodedTensor, which replaces its stored tensors
    """

    def __init__(self, directory: Path) -> None:
        """Open every file and check its header; find the encoded matrices. Raises CheckpointError."""
        self.directory = directory
        self._files: list[WeightsFile] = []
        try:
            self.config, self.tensors, self._order = self._open_gguf() if is_gguf(directory) else self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            file.close()

    def stamps(self) -> dict[str, tuple[int, int]]:
        """Return each file's size in bytes and modification time in nanoseconds, by file name.

        The name of a file in a folder of the checkpoint begins with the folder's.
        """
        return {self._named(file.path): file.stamp() for file in self._files}

    def _named(self, path: Path) -> str:
        return (
            str(path.relative_to(self.directory))
            if path.is_relative_to(self.directory / path.parent.name)
            else path.name
        )

    def stored_order(self) -> Iterator[StoredTensor | EncodedTensor]:
        """Yield all tensors in order of file and offset, so that files are read sequentially where possible.

        An encoded matrix takes the position of the first tensor of its `parts`.
        """
        return iter(self._order)

    def _open(self) -> tuple[dict[str, Any], Contents, list[StoredTensor | EncodedTensor]]:
        """Return `config`, `tensors`, and the tensors in stored order."""
        config = read_config(self.directory)
        stored = [*self._open_safetensors(), *self._open_layers()]
        try:
            tensors = find.encoded(config, {tensor.name: tensor for tensor in stored})
        except CheckpointError as error:  # the message of `error` lacks the directory
            raise CheckpointError(f"{self.directory}: {error}") from error
        begins = {_first_part(tensor).name: tensor for tensor in tensors.values()}
        return config, tensors, [begins[tensor.name] for tensor in stored if tensor.name in begins]

    def _open_gguf(self) -> tuple[dict[str, Any], Contents, list[StoredTensor | EncodedTensor]]:
        """See `_open`."""
        opened = gguf_file.Checkpoint(self.directory)
        self._files += opened.parts
        config, ordered = gguf.contents(opened)
        return config, {tensor.name: tensor for tensor in ordered}, ordered

    def _open_safetensors(self) -> list[StoredTensor]:
        single, index = self.directory / SINGLE, self.directory / INDEX
        promised = indexed_files(index) if index.exists() and not single.exists() else {}
        if not promised and not single.exists():
            raise CheckpointError(f"{single}: No such file{_instead(self.directory)}")
        opened = []
        for file in sorted(set(promised.values()), key=_natural) or [SINGLE]:
            opened.append(TensorFile(self.directory / file))
            self._files.append(opened[-1])
        tensors: dict[str, StoredTensor] = {}
        for tensor in (tensor for file in opened for tensor in file.tensors):
            if tensor.name in tensors:
                other = tensors[tensor.name].file.path
                raise CheckpointError(f"{tensor.file.path}: {tensor.name} is in {other.name} too")
            tensors[tensor.name] = tensor
        for name, promise in promised.items():
            if name not in tensors or tensors[name].file.path.name != promise:
                raise CheckpointError(f"{index}: {name} should be in {promise}, which does not hold it")
        return list(tensors.values())

    def _open_layers(self) -> Iterator[StoredTensor]:
        """Yield the tensors of layers with files of their own, named by folder or file: 2_Dense/linear.weight."""
        for name, prefix in weight_files(self.directory).items():
            path = self.directory / name
            opened = TensorFile(path) if path.suffix == ".safetensors" else TorchFile(path)
            self._files.append(opened)
            for tensor in opened.tensors:
                yield replace(tensor, name=f"{prefix}{tensor.name}")


def locate(path: str, root: str) -> Path:
    """Return the directory, or the GGUF file, of the checkpoint at `path`, which an operator named.

    root  directory that must contain the checkpoint and its files after symbolic links are resolved; see
          model.weights_root and `Root`

    Raises CheckpointError.
    """
    within = Root(root, "model.weights_root")
    if is_gguf(Path(path)):
        file = within.find_file(path)
        for part in gguf_file.parts(file):
            within.follow(part, path)
        return file
    directory = within.find(path)
    for file in (*directory.iterdir(), *directory.glob("[0-9]*_*/*")):  # folders: modules of sentence-transformers
        if file.suffix in (".json", ".safetensors", ".pt", ".bin"):
            within.follow(file, path)
    return directory


def gguf_files(directory: Path) -> list[Path]:
    """Return the GGUF files below a directory, none if it contains safetensors; of a file in parts, the first part."""
    if (directory / SINGLE).exists() or (directory / INDEX).exists():
        return []
    names = [str(path.relative_to(directory)) for path in directory.rglob(f"*{SUFFIX}")]
    return [directory / name for name in gguf_file.first_parts(names)]


def only_gguf(directory: Path) -> Path:
    """Return the only GGUF file of `gguf_files`; `directory` if there is none. Raises CheckpointError for several."""
    found = gguf_files(directory)
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(directory)) for path in found)
        raise CheckpointError(f"{directory} contains several GGUF files: name one of {names}")
    return found[0] if found else directory


def read_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json; for a GGUF file, the content made from its metadata.

    If config.json lacks `quantization_config`, the content of file MODELOPT becomes `quantization_config`. If it
    has one of ModelOpt without `group_size`, that of file MODELOPT is added. Raises CheckpointError.
    """
    if is_gguf(directory):
        with gguf_file.Checkpoint(directory) as file:
            return gguf_config.read_config(file)
    config = _read_object(directory / "config.json")
    table = config.get("quantization_config")
    described = isinstance(table, dict) and table.get("quant_method") == "modelopt"
    if (table is None or described) and (beside := directory / MODELOPT).exists():
        stated = _read_object(beside)
        if not described:
            config["quantization_config"] = {"quant_method": "modelopt", **stated}
        elif isinstance(inner := stated.get("quantization"), dict) and "group_size" in inner:
            config["quantization_config"] = {"group_size": inner["group_size"], **config["quantization_config"]}
    return config


def indexed_files(path: Path) -> dict[str, str]:
    """Return the file name of each tensor, from the index at `path`.

    Raises CheckpointError, also if a file name includes a directory.
    """
    files = _read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: expected a weight_map")
    for name, file in files.items():
        if type(file) is not str or Path(file).name != file or "\0" in file:
            raise CheckpointError(f"{path}: {name}: expected the name of a file, found {file!r}")
    return files


def _first_part(tensor: StoredTensor | EncodedTensor) -> StoredTensor:
    return tensor if tensor.encoding is None else tensor.encoding.parts[0]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read(path), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: malformed: {error}") from error


def _natural(name: str) -> list[tuple[str, int, str]]:
    """Return a sort key that compares the numbers in names by value, so that file 2 precedes file 10."""
    pieces = ((text, number.lstrip("0")) for text, number in _COUNTED.findall(name))
    return [(text, len(number), number) for text, number in pieces]


def _instead(directory: Path) -> str:
    found = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
    if not found:
        return ""
    return (
        f"; there is {found[0]}, but infd reads safetensors and GGUF only, since pickled weights may contain programs."
        " If you trust their origin, transformers converts them: AutoModel.from_pretrained(DIRECTORY)"
        ".save_pretrained(DIRECTORY)"
    )
