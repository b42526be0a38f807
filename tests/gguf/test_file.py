"""The reader of GGUF files: what it finds, and that malformed files are refused before anything large is allocated."""

from __future__ import annotations

import random
import struct
import tracemalloc
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from infd.errors import CheckpointError
from infd.gguf.config import read_config
from infd.gguf.file import Checkpoint, first_parts
from infd.gguf.metadata import HEADER_BYTES
from infd.weights.checkpoint import Checkpoint as Weights
from tests.gguf.writing import TYPES, write
from tests.tiny import make

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with keys of all kinds and tensors of two types."""
    directory = tmp_path_factory.mktemp("whole")

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token{number}" for number in range(20)])
        writer.add_token_scores([-float(number) for number in range(20)])
        writer.add_add_bos_token(True)

    return write(
        make("llama", directory / "checkpoint", hidden_size=64, num_hidden_layers=1),
        directory / "model.gguf",
        TYPES.Q8_0,
        vocabulary=vocabulary,
    )


def reason(path: Path) -> str | None:
    """Return the message with which a file is refused; None if it is accepted."""
    try:
        with Checkpoint(path) as file:
            read_config(file)
        Weights(path).close()
    except CheckpointError as error:
        return str(error)
    return None


def refused(path: Path) -> str:
    message = reason(path)
    assert message is not None
    assert message.startswith(str(path))
    return message


def test_keys_and_tensors_equal_the_packages(whole: Path) -> None:
    reader = gguf.GGUFReader(whole)
    with Checkpoint(whole) as file:
        assert file.metadata.keys() == [key for key in reader.fields if not key.startswith("GGUF.")]
        assert file.metadata.texts("tokenizer.ggml.tokens") == reader.fields["tokenizer.ggml.tokens"].contents()
        assert (
            file.metadata.numbers("tokenizer.ggml.scores").tolist() == reader.fields["tokenizer.ggml.scores"].contents()
        )
        assert file.metadata.boolean("tokenizer.ggml.add_bos_token") is True
        assert file.metadata.number("llama.rope.freq_base") == reader.fields["llama.rope.freq_base"].contents()
        (part,) = file.parts
        found = [(each.name, each.kind.name, each.shape, each.offset, each.bytes) for each in part.tensors]
        assert found == [
            (each.name, each.tensor_type.name, tuple(each.shape.tolist()[::-1]), each.data_offset, each.n_bytes)
            for each in reader.tensors
        ]
        assert {"F32", "Q8_0"} == {each.kind.name for each in part.tensors}


def test_a_checkpoint_in_parts_equals_one_file(whole: Path, tmp_path: Path) -> None:
    first = write(
        make("llama", tmp_path / "checkpoint", hidden_size=64, num_hidden_layers=1),
        tmp_path / "model.gguf",
        TYPES.Q8_0,
        parts=3,
    )
    with Weights(first) as parts, Weights(whole) as one:
        assert len(list(tmp_path.glob("*.gguf"))) == 3
        assert parts.config == one.config
        assert {name: (each.shape, each.bytes) for name, each in parts.tensors.items()} == {
            name: (each.shape, each.bytes) for name, each in one.tensors.items()
        }
        assert len(parts.stamps()) == 3


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = write(make("llama", tmp_path / "checkpoint"), tmp_path / "model.gguf", parts=3)
    second = tmp_path / "model-00002-of-00003.gguf"
    third = tmp_path / "model-00003-of-00003.gguf"

    with pytest.raises(CheckpointError, match=r"is part 2 of 3; name the first: model-00001-of-00003\.gguf"):
        Checkpoint(second)
    content = second.read_bytes()
    second.write_bytes(third.read_bytes())
    with pytest.raises(CheckpointError, match="says that it is part 3 of 3, where part 2 of 3 is expected"):
        Checkpoint(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf: No such file"):
        Checkpoint(first)
    assert content.count(b"blk.1.attn_norm.weight") == 1
    second.write_bytes(content.replace(b"blk.1.attn_norm.weight", b"blk.0.attn_norm.weight"))
    with pytest.raises(
        CheckpointError, match=r"00003\.gguf: blk\.0\.attn_norm\.weight is in model-00001-of-00003\.gguf"
    ):
        Checkpoint(first)
    second.write_bytes(content)
    begin, key = first.read_bytes(), b"split.tensors.count" + (5).to_bytes(4, "little")  # of type int32
    stated = int.from_bytes(begin[begin.index(key) + len(key) :][:4], "little")
    first.write_bytes(begin.replace(key + stated.to_bytes(4, "little"), key + (stated + 1).to_bytes(4, "little")))
    with pytest.raises(CheckpointError, match=rf"count is {stated + 1}; the parts have {stated} tensors"):
        Checkpoint(first)
    second.unlink()
    third.rename(tmp_path / "model-00001-of-01025.gguf")
    with pytest.raises(CheckpointError, match="1025 parts; between 1 and 1024"):
        Checkpoint(tmp_path / "model-00001-of-01025.gguf")


def test_the_first_parts_of_a_folder_are_found() -> None:
    names = ["a.gguf", "b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "config.json", "c-00001-of-2.gguf"]
    assert first_parts(names) == ["a.gguf", "b-00001-of-00002.gguf", "c-00001-of-2.gguf"]


def fields(path: Path) -> Iterator[tuple[str, int, str]]:
    """Yield each count, length, type and offset in a header: (description, place, format of struct)."""
    reader = gguf.GGUFReader(path)
    start = reader.data.ctypes.data
    yield from (("tensors", 8, "Q"), ("keys", 16, "Q"))
    for key, field in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        yield f"length of key {key}", field.offset, "Q"
        for index, part in enumerate(field.parts[2:-1] or field.parts[2:3]):
            if part.itemsize in (4, 8) and part.dtype.kind == "u":
                yield (
                    f"type of {key}" if index == 0 else f"{key}, {index}",
                    part.ctypes.data - start,
                    "IQ"[part.itemsize == 8],
                )
    for tensor in reader.tensors:
        place = tensor.field.offset
        yield f"length of name {tensor.name}", place, "Q"
        place += 8 + len(tensor.name)
        yield f"dimensions of {tensor.name}", place, "I"
        for dimension in range(len(tensor.shape)):
            yield f"dimension {dimension} of {tensor.name}", place + 4 + 8 * dimension, "Q"
        place += 4 + 8 * len(tensor.shape)
        yield f"type of {tensor.name}", place, "I"
        yield f"offset of {tensor.name}", place + 4, "Q"


def test_hostile_counts_lengths_types_and_offsets_are_refused(whole: Path, tmp_path: Path) -> None:
    """Every number that the header's structure depends on, replaced by several others."""
    content, path = whole.read_bytes(), tmp_path / "hostile.gguf"
    tried = 0
    for description, place, code in fields(whole):
        (old,) = struct.unpack_from(f"<{code}", content, place)
        largest = 2 ** (8 * struct.calcsize(code)) - 1
        nearest = {99} if description.startswith("type of") else {old + 1}  # the next type may have the same size
        for new in {largest, largest // 2, 2**31, old + 2**20} | nearest:
            changed = bytearray(content)
            struct.pack_into(f"<{code}", changed, place, new)
            path.write_bytes(changed)
            fault = reason(path)
            assert fault is not None, f"{description}: {new} instead of {old} is accepted"
            assert fault.startswith(str(path))
            tried += 1
    assert tried >= 300


def test_a_file_cut_anywhere_is_refused(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "cut.gguf"
    with Checkpoint(whole) as file:
        header = file.parts[0].tensors[0].offset
    for size in [*range(0, header, 37), *range(header, len(content), 9973), len(content) - 33]:
        path.write_bytes(content[:size])
        refused(path)


def test_random_changes_are_refused_or_harmless_and_allocate_little(whole: Path, tmp_path: Path) -> None:
    content, path, draw = whole.read_bytes(), tmp_path / "changed.gguf", random.Random(5)
    with Checkpoint(whole) as file:
        header = file.parts[0].tensors[0].offset
    refusals = 0
    tracemalloc.start()
    try:
        for _ in range(200):
            changed = bytearray(content)
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(header)] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
            path.write_bytes(changed)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            fault = reason(path)
            assert fault is None or fault.startswith(str(path))
            refusals += fault is not None
            assert tracemalloc.get_traced_memory()[1] - before < 4 * len(content)
    finally:
        tracemalloc.stop()
    assert refusals > 60


def changed(whole: Path, path: Path, old: bytes, new: bytes) -> Path:
    content = whole.read_bytes()
    assert content.count(old) >= 1
    assert len(old) == len(new)
    path.write_bytes(content.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"GGUF\3\0\0\0", b"GGML\3\0\0\0", "expected a GGUF file"),
        (b"GGUF\3\0\0\0", b"GGUF\1\0\0\0", "version 1; infd reads versions 2 and 3"),
        (b"GGUF\3\0\0\0", b"GGUF\0\0\0\3", "a big-endian file"),
        (b"llama.block_count", b"llama.block_kount", "llama.block_count is missing"),
        (b"token_embd.weight", b"token_embz.weight", "token_embd.weight is missing"),
        (b"blk.0.attn_k.weight", b"blk.0.attn_q.weight", "blk.0.attn_q.weight occurs twice"),
        (b"token3", b"tok\xff\xfe3", "tokenizer.ggml.tokens"),
    ],
)
def test_an_error_names_the_fault(whole: Path, tmp_path: Path, old: bytes, new: bytes, said: str) -> None:
    path = changed(whole, tmp_path / "wrong.gguf", old, new)
    if said == "tokenizer.ggml.tokens":
        with (
            Checkpoint(path) as file,
            pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens: a text is not UTF-8"),
        ):
            file.metadata.texts("tokenizer.ggml.tokens")
    else:
        assert said in refused(path)


def test_types_that_infd_does_not_decode_are_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 66), np.uint8), raw_dtype=TYPES.IQ2_XXS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "blk.0.ffn_up.weight: type IQ2_XXS is not supported; supported: F32" in refused(tmp_path / "other.gguf")


def test_a_header_larger_than_the_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    count = HEADER_BYTES + 1
    key = b"some.key"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, len(key)) + key + struct.pack("<IIQ", 9, 0, count))
    with path.open("r+b") as file:
        file.truncate(2 * HEADER_BYTES)
    tracemalloc.start()
    try:
        assert "at most" in refused(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
