"""Draw malformed variants of `written/` and of GGUF files: each has one fault for which it must be refused."""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import gguf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from infd.weights.checkpoint import BITS
from tests.gguf.test_file import fields
from tests.gguf.writing import TYPES, write
from tests.tiny import make
from tests.weights.encodings.fixtures import NAMES, WRITTEN

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "model.safetensors"
PART = "part.safetensors"  # of a checkpoint with an index
SCALES = ("scale", "scales", "scale_2", "SCB", "absmax", "zero_point", "qzeros")


class Fault(NamedTuple):
    """A fault of a checkpoint's files.

    told   in words, for the tests' messages
    files  contents by name, in place of the intact ones
    names  texts that the refusal must contain
    """

    told: str
    files: dict[str, bytes]
    names: tuple[str, ...]


class Intact:
    """The files of a checkpoint, and the parts of its safetensors file."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.further = {path.name: path.read_bytes() for path in directory.glob("hf_*.json")}
        self.content = (directory / NAME).read_bytes()
        (length,) = struct.unpack("<Q", self.content[:8])
        self.header: dict[str, Any] = json.loads(self.content[8 : 8 + length])
        self.data = self.content[8 + length :]
        self.tensors = {name: each for name, each in self.header.items() if name != "__metadata__"}
        self.encoded = [name for name in self.tensors if ".layers." in name and "norm" not in name]

    def written(self, header: dict[str, Any] | bytes, data: bytes | None = None, length: int | None = None) -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + (self.data if data is None else data)

    def tensor(self, name: str) -> tuple[str, list[int], bytes]:
        """Return a tensor's dtype, shape and content."""
        each = self.tensors[name]
        begin, end = each["data_offsets"]
        return each["dtype"], each["shape"], self.data[begin:end]

    def repacked(self, tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
        """Return a file with some tensors replaced or added: dtype, shape, content."""
        header, data = {}, bytearray()
        for name, (dtype, shape, content) in ({name: self.tensor(name) for name in self.tensors} | tensors).items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        return self.written(header, bytes(data))

    def without(self, name: str) -> bytes:
        left = {key: each for key, each in self.tensors.items() if key != name}
        whole = Intact.__new__(Intact)
        whole.tensors, whole.data = left, self.data
        return whole.repacked({})


def _filled(dtype: str, shape: list[int], content: bytes) -> tuple[str, list[int], bytes]:
    """Return a tensor of this dtype and shape, whose bytes repeat `content`."""
    size = BITS[dtype] // 8
    for dimension in shape:
        size *= dimension
    return dtype, shape, (content * (size // max(len(content), 1) + 1))[:size]


def _lengths(intact: Intact, draw: random.Random) -> Fault:
    true = len(intact.content) - len(intact.data) - 8
    false = draw.choice([0, 1, true - 1, true + 1, true + 8, len(intact.content), 2**31, 2**40, 2**63, 2**64 - 1])
    content = struct.pack("<Q", false) + intact.content[8:]
    return Fault(f"header of {false} bytes instead of {true}", {NAME: content}, (NAME,))


def _cut(intact: Intact, draw: random.Random) -> Fault:
    at = draw.randrange(len(intact.content))
    return Fault(f"cut after {at} bytes", {NAME: intact.content[:at]}, (NAME,))


def _longer(intact: Intact, draw: random.Random) -> Fault:
    return Fault("bytes after the last tensor", {NAME: intact.content + bytes(draw.randint(1, 5000))}, (NAME,))


def _entry(intact: Intact, draw: random.Random) -> Fault:
    """One value of one tensor's entry in the header."""
    name = draw.choice(list(intact.tensors))
    each = intact.tensors[name]
    begin, end = each["data_offsets"]
    size, shape = end - begin, each["shape"]
    changes: list[dict[str, Any]] = [
        {"data_offsets": value}
        for value in (
            [end + 1, begin],
            [begin, end + 1],
            [begin + 1, end],
            [begin + 2**40, end + 2**40],
            [-size - 1, -1],
            [begin, 2**64],
            [2**70, 2**70 + size],
            [float(begin), end + 0.5],
            [begin],
            [begin, end, end],
            "all",
            None,
        )
    ]
    changes += [{"dtype": value} for value in ("F33", "", 5, None, "Q4_0")]
    changes += [{"shape": value} for value in ([*shape, 2], [2**62] * 16, [-1], [1] * 17, [2**64], None, 3, "2", [1.5])]
    change = draw.choice(changes)
    return Fault(f"{name}: {change}", {NAME: intact.written({**intact.header, name: {**each, **change}})}, (NAME,))


def _entry_missing(intact: Intact, draw: random.Random) -> Fault:
    name = draw.choice(list(intact.tensors))
    header = {key: each for key, each in intact.header.items() if key != name}
    return Fault(f"no entry for {name}", {NAME: intact.written(header)}, (NAME,))


def _entry_twice(intact: Intact, draw: random.Random) -> Fault:
    """Names twice in the header's JSON: once with the tensor's place, once with another's."""
    name, other = draw.sample(list(intact.tensors), 2)
    text = json.dumps(intact.header)[1:-1]
    first = {name: intact.tensors[other]}
    pair = [json.dumps(first)[1:-1], text]
    draw.shuffle(pair)
    return Fault(f"{name} twice in the header", {NAME: intact.written(f"{{{', '.join(pair)}}}".encode())}, (NAME,))


def _same_entry_twice(intact: Intact, draw: random.Random) -> Fault:
    name = draw.choice(list(intact.tensors))
    again = json.dumps({name: intact.tensors[name]})[1:-1]
    text = f"{{{again}, {json.dumps(intact.header)[1:-1]}}}"
    return Fault(f"{name} twice, in one place", {NAME: intact.written(text.encode())}, (NAME,))


def _no_json(intact: Intact, draw: random.Random) -> Fault:
    text = draw.choice([b"", b"[]", b"{", b"null", b"\xff\xfe", b'{"a":' + b"[" * 50_000, b'{"\\ud800": 1}', b"{} {}"])
    return Fault(f"header {text[:20]!r}", {NAME: intact.written(text)}, (NAME,))


def _part_missing(intact: Intact, draw: random.Random) -> Fault:
    optional = ("pre_quant_scale", "g_idx", "k_scale", "v_scale", "weight_format", "input_scale", "weight_shape")
    name = draw.choice([name for name in intact.encoded if not name.endswith(optional)])
    return Fault(f"{name} missing", {NAME: intact.without(name)}, (name.rpartition(".")[0],))


def _shape(intact: Intact, draw: random.Random) -> Fault:
    name = draw.choice(intact.encoded)
    each = intact.tensors[name]
    dtype, shape = each["dtype"], each["shape"]
    wrong = [*shape, 2] if shape else [draw.choice([0, 2, 7])]
    if shape and draw.random() < 0.8:
        axis = draw.randrange(len(shape))
        wrong = list(shape)
        wrong[axis] = draw.choice(
            [0, *({shape[axis] - 1} - {0}), shape[axis] + 1, shape[axis] + 8, shape[axis] * 2 + 1]
        )
    begin, end = each["data_offsets"]
    content = intact.repacked({name: _filled(dtype, wrong, intact.data[begin:end])})
    return Fault(f"{name} {wrong} instead of {shape}", {NAME: content}, (NAME, name.rpartition(".")[0]))


def _dtype(intact: Intact, draw: random.Random) -> Fault:
    name = draw.choice(intact.encoded)
    each = intact.tensors[name]
    wrong = draw.choice([dtype for dtype in ("F64", "I64", "BOOL", "U16", "I16") if dtype != each["dtype"]])
    begin, end = each["data_offsets"]
    content = intact.repacked({name: _filled(wrong, each["shape"], intact.data[begin:end])})
    return Fault(f"{name} {wrong}", {NAME: content}, (NAME, name.rpartition(".")[0]))


def _scale_twice(intact: Intact, draw: random.Random) -> Fault:
    """A second scale of a matrix, of a name that its format does not have."""
    name = draw.choice([name for name in intact.encoded if name.rpartition(".")[2].endswith(SCALES)] or intact.encoded)
    each = intact.tensors[name]
    begin, end = each["data_offsets"]
    again = f"{name.rpartition('.')[0]}.{draw.choice(['second', 'weight', 'scale_of'])}_{name.rpartition('.')[2]}"
    content = intact.repacked({again: (each["dtype"], each["shape"], intact.data[begin:end])})
    return Fault(f"{again} beside {name}", {NAME: content}, (NAME, again))


def _scale_in_two_files(intact: Intact, draw: random.Random) -> Fault:
    name = draw.choice(intact.encoded)
    each = intact.tensors[name]
    begin, end = each["data_offsets"]
    one = {name: {**each, "data_offsets": [0, end - begin]}}
    index = {"weight_map": dict.fromkeys(intact.tensors, PART) | {draw.choice([name, "x"]): "more.safetensors"}}
    files = {
        PART: intact.content,
        "more.safetensors": intact.written(one, intact.data[begin:end]),
        "model.safetensors.index.json": json.dumps(index).encode(),
    }
    return Fault(f"{name} in two files", files, ("safetensors",))


def _index(intact: Intact, draw: random.Random) -> Fault:
    names = dict.fromkeys(intact.tensors, PART)
    name = draw.choice(list(names))
    index: Any = draw.choice(
        [
            [],
            {},
            {"weight_map": []},
            {"weight_map": {**names, name: 1}},
            {"weight_map": {**names, name: "../" + PART}},
            {"weight_map": {**names, name: "/etc/passwd"}},
            {"weight_map": {**names, name: "x\0"}},
            {"weight_map": {**names, name: "gone.safetensors"}},
            {"weight_map": {**names, "one.more": PART}},
        ]
    )
    files = {"model.safetensors.index.json": json.dumps(index).encode(), PART: intact.content}
    return Fault(f"an index that does not fit: {json.dumps(index)[-100:]}", files, ("safetensors",))


def _config(intact: Intact, draw: random.Random) -> Fault:
    """Groups, bits or a method that the format does not have, or that do not fit the tensors."""
    config = json.loads(json.dumps(intact.config))
    table = config["quantization_config"]
    groups = [group["weights"] for group in table.get("config_groups", {}).values() if "weights" in group]
    changes: list[Callable[[], Any]] = [
        lambda: table.update(quant_method=draw.choice(["hqq", "aqlm", "", 7, ["gptq"]])),
        lambda: config.update(quantization_config=draw.choice(["int4", 7, [table]])),
        lambda: config.update(num_hidden_layers=draw.choice([-1, 2, "x", 1.5, 2**40])),
        lambda: config.update(hidden_size=draw.choice([0, -8, config["hidden_size"] + 32, 2**50])),
    ]
    if table["quant_method"] == "compressed-tensors":
        changes += [
            lambda: [each.update(num_bits=draw.choice([0, 1, 9, 64, "4"])) for each in groups],
            lambda: [each.update(type=draw.choice(["uint", "fp", 3])) for each in groups],
            lambda: [each.update(strategy=draw.choice(["rows", "x", 3])) for each in groups],
            lambda: table.update(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
            lambda: table.update(sparsity_config={"format": "sparse-24-bitmask"}),
        ]
    if table["quant_method"] in ("gptq", "awq"):
        changes += [
            lambda: table.update(group_size=draw.choice([-7, 2**24 + 1, "128", 1.5, 48])),
            lambda: table.update(bits=draw.choice([0, 3, 5, 16, "4", None])),
        ]
    if table["quant_method"] == "fp8":
        changes.append(lambda: table.update(weight_block_size=draw.choice([[128], [0, 128], [-1, 1], "128", [64, 64]])))
    if table["quant_method"] == "modelopt":
        changes.append(lambda: table.update(quant_algo=draw.choice(["NVFP5", "", 8, ["FP8"]])))
    draw.choice(changes)()
    content = json.dumps(config).encode()
    return Fault(f"config {_different(intact.config, config)}", {"config.json": content}, ())


def _different(before: dict[str, Any], after: dict[str, Any]) -> str:
    found = {key: value for key, value in after.items() if before.get(key) != value}
    return json.dumps(found)[:200]


SAFETENSORS = (
    _lengths,
    _cut,
    _longer,
    _entry,
    _entry_missing,
    _entry_twice,
    _same_entry_twice,
    _no_json,
    _part_missing,
    _shape,
    _dtype,
    _scale_twice,
    _scale_in_two_files,
    _index,
    _config,
)


class Blocks:
    """A GGUF file with a tokenizer, and the places of the numbers on which its header's structure depends."""

    def __init__(self, directory: Path, kind: TYPES) -> None:
        made = make("llama", directory / "made", hidden_size=256, num_hidden_layers=1)
        path = write(made, directory / f"{kind.name}.gguf", kind, vocabulary=_vocabulary)
        self.content = path.read_bytes()
        self.places = list(fields(path))
        reader = gguf.GGUFReader(path)
        self.tensors = [each.name for each in reader.tensors]
        self.header = min(each.data_offset for each in reader.tensors)

    def changed(self, told: str, content: bytes | bytearray) -> Fault:
        return Fault(told, {"model.gguf": bytes(content)}, ("model.gguf",))


def _vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(199)])
    writer.add_token_merges(["t 1", "t 2"])
    writer.add_pad_token_id(0)


def _number(intact: Blocks, draw: random.Random) -> Fault:
    told, place, code = draw.choice(intact.places)
    (old,) = struct.unpack_from(f"<{code}", intact.content, place)
    largest = 2 ** (8 * struct.calcsize(code)) - 1
    near = 99 if told.startswith("type of") else old + 1  # the next type may have the same size
    new = draw.choice([largest, largest // 2, 2**31, old + 2**20, near, largest - draw.randrange(2**16)])
    changed = bytearray(intact.content)
    struct.pack_into(f"<{code}", changed, place, new)
    return intact.changed(f"{told}: {new} instead of {old}", changed)


def _gguf_cut(intact: Blocks, draw: random.Random) -> Fault:
    at = draw.randrange(draw.choice([intact.header, len(intact.content) - 32]))
    return intact.changed(f"cut after {at} bytes", intact.content[:at])


def _name_twice(intact: Blocks, draw: random.Random) -> Fault:
    """One tensor under the name of another of the same length, or under no name of UTF-8."""
    names = [each.encode() for each in intact.tensors]
    old = draw.choice([each for each in names if sum(len(each) == len(other) for other in names) > 1])
    new = draw.choice([*(each for each in names if len(each) == len(old) and each != old), b"\xff" * len(old)])
    return intact.changed(f"{old!r} named {new!r}", intact.content.replace(old, new, 1))


def _key(intact: Blocks, draw: random.Random) -> Fault:
    needed = (b"llama.block_count", b"llama.embedding_length", b"llama.attention.head_count", b"general.architecture")
    old = draw.choice(needed)
    new = draw.choice([old[:-1] + b"\xff", old[:-1] + b"_"])
    return intact.changed(f"{old!r} named {new!r}", intact.content.replace(old, new, 1))


def _magic(intact: Blocks, draw: random.Random) -> Fault:
    new = draw.choice([b"GGML\3\0\0\0", b"GGUF\1\0\0\0", b"GGUF\0\0\0\3", b"GGUF\x63\0\0\0", bytes(8)])
    return intact.changed(f"begins with {new!r}", new + intact.content[8:])


GGUF = (_number, _number, _number, _gguf_cut, _name_twice, _key, _magic)
KINDS = (TYPES.Q8_0, TYPES.Q4_K, TYPES.IQ4_XS, TYPES.F16)


class Drawing:
    """Malformed variants, in turn of every checkpoint of `written/` and of GGUF files of some types."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._draw, self._directory = random.Random(seed), directory
        self._written = {name: Intact(WRITTEN / name) for name in NAMES}
        self._blocks = {}
        for kind in KINDS:
            (directory / kind.name).mkdir()
            self._blocks[kind.name] = Blocks(directory / kind.name, kind)
        self._tokens = Tokenizer(WordLevel({f"t{number}": number for number in range(64)}, unk_token="t0")).to_str()

    def intact(self, number: int) -> Path:
        """Write checkpoint `number` without a fault, and return its path."""
        names = [*self._written, *self._blocks]
        return self._write(names[number % len(names)], Fault("", {}, ()))

    def taller(self) -> Path:
        """Write a checkpoint that lacks the second layer of its config, and return its path."""
        name, config = NAMES[0], {**self._written[NAMES[0]].config, "num_hidden_layers": 2}
        return self._write(name, Fault("", {"config.json": json.dumps(config).encode()}, ()))

    def variant(self, number: int) -> tuple[Path, str, tuple[str, ...]]:
        """Write variant `number`. Return its path, the fault in words, and texts that the refusal must contain."""
        names = [*self._written, *(2 * [*self._blocks])]
        name = names[number % len(names)]
        kinds = number // len(names)
        if name in self._written:
            fault = SAFETENSORS[(number + kinds) % len(SAFETENSORS)](self._written[name], self._draw)
        else:
            fault = GGUF[(number + kinds) % len(GGUF)](self._blocks[name], self._draw)
        return self._write(name, fault), f"{name}, {fault.told}", fault.names

    def _write(self, name: str, fault: Fault) -> Path:
        directory = self._directory / "variant"
        directory.mkdir(exist_ok=True)
        for each in directory.iterdir():
            each.unlink()
        if name in self._blocks:
            path = directory / "model.gguf"
            path.write_bytes(fault.files.get(path.name, self._blocks[name].content))
            return path
        intact = self._written[name]
        whole = {} if PART in fault.files else {NAME: intact.content}
        files = {**whole, **intact.further, "config.json": json.dumps(intact.config).encode(), **fault.files}
        for file, content in {**files, "tokenizer.json": self._tokens.encode()}.items():
            (directory / file).write_bytes(content)
        return directory
