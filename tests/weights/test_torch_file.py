"""Files of torch.save: what torch wrote is read, everything else is refused with the file and the reason."""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from infd.errors import CheckpointError
from infd.weights.torch_file import TorchFile

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def contents(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file as infd reads them."""
    file = TorchFile(path)
    try:
        return {
            each.name: torch.frombuffer(bytearray(each.content()), dtype=DTYPES[each.dtype]).reshape(each.shape)
            for each in file.tensors
        }
    finally:
        file.close()


def saved(tmp_path: Path, content: Any, **options: Any) -> Path:
    path = tmp_path / "layer.pt"
    torch.save(content, path, **options)
    return path


def pickled(tmp_path: Path, pickle: bytes, numbers: bytes = bytes(24)) -> Path:
    """Return an archive with this pickle, and a storage of 24 bytes."""
    path = tmp_path / "layer.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("layer/data.pkl", pickle)
        archive.writestr("layer/data/0", numbers)
    return path


def tensor(shape: tuple[int, ...], strides: tuple[int, ...], first: int = 0, count: int = 6, key: str = "0") -> bytes:
    """Return the pickle of a dict of one tensor, with these sizes."""

    class Storage:
        pass

    class Tensor:
        def __reduce__(self):
            return (torch._utils._rebuild_tensor_v2, (Storage(), first, shape, strides, False, OrderedDict()))

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", count) if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"weight": Tensor()})
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("protocol", [2, 4])
def test_files_of_torch_save_are_read_as_torch_reads_them(dtype: torch.dtype, protocol: int, tmp_path: Path):
    both = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    layer = torch.nn.Linear(3, 2).to(dtype)
    for content in (layer.state_dict(), {"a": both[:2], "b": both[2:], "c": both.flatten()[4:5], "d": both[0, 0]}):
        path = saved(tmp_path, content, pickle_protocol=protocol)
        ours, theirs = contents(path), torch.load(path, weights_only=False)
        assert ours.keys() == theirs.keys()
        assert all(ours[name].equal(theirs[name]) for name in theirs)


class Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/infd-was-here",)


REFUSED: dict[str, tuple[Any, str]] = {
    "another global": ({"weight": Runs()}, r"names (posix|nt)\.system"),
    "a nested dict": ({"weight": {"a": torch.ones(2)}}, "expected a flat dict of tensors, found str with a dict"),
    "a list": ([torch.ones(2)], "the instruction EMPTY_LIST"),
    "a tensor alone": (torch.ones(2), "expected a dict of tensors, found a tensor"),
    "a number": ({"weight": 1.0}, "the instruction BINFLOAT"),
    "integers": ({"weight": torch.ones(2, dtype=torch.int64)}, r"names torch\.LongStorage"),
    "a transposed tensor": ({"weight": torch.ones(2, 3).T}, "has strides"),
    "a parameter": ({"weight": torch.nn.Parameter(torch.ones(2))}, r"names torch\._utils\._rebuild_parameter"),
    "a module": (torch.nn.Linear(2, 2), r"names torch\.nn\.modules\.linear\.Linear"),
    "an empty dict": ({}, "expected a dict of tensors, found a dict"),
}


@pytest.mark.parametrize("content", REFUSED)
def test_other_contents_are_refused_by_name(content: str, tmp_path: Path):
    given, reason = REFUSED[content]
    with pytest.raises(CheckpointError, match=rf"layer\.pt: .*{reason}"):
        TorchFile(saved(tmp_path, given))


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (tensor((2, 3), (3, -1)), "negative"),
        (tensor((2, -3), (3, 1)), "negative"),
        (tensor((2, 3), (3, 1), first=-1), "negative"),
        (tensor((2, 3), (3, 1), first=1), "larger than its storage"),
        (tensor((2, 4), (4, 1)), "larger than its storage"),
        (tensor((2, 3), (0, 1)), "has strides"),
        (tensor((2**47, 2**47), (2**47, 1)), "larger than its storage"),
        (tensor((2**60,), (1,)), "too large"),
        (tensor((2, 3), (3,)), "different numbers"),
        (tensor((2, 3), (3, 1), count=7), "more numbers than the 24 bytes"),
        (tensor((2, 3), (3, 1), count=-1), "more numbers"),
        (tensor((2, 3), (3, 1), key="1"), "missing in the archive"),
        (tensor((2, 3), (3, 1), key="../data.pkl"), "missing in the archive"),
        (pickle.dumps(b"", 4), "the instruction SHORT_BINBYTES"),
        (b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.", "flat dict"),
        (b"\x80\x02}(X\x01\x00\x00\x00au.", "sets items"),
        (b"\x80\x02u.", "malformed"),
        (b"\x80\x02h\x07.", "malformed"),
        (b"\x80\x02}", "malformed"),
        (b"", "malformed"),
        (bytes(2**20 + 1), "at most 1048576"),
    ],
)
def test_hostile_pickles_are_refused_with_the_reason(described: bytes, reason: str, tmp_path: Path):
    with pytest.raises(CheckpointError, match=rf"layer\.pt: .*{reason}"):
        TorchFile(pickled(tmp_path, described))


def test_hostile_archives_are_refused_with_the_reason(tmp_path: Path):
    good = saved(tmp_path, {"weight": torch.ones(2)}).read_bytes()
    directory = good.index(b"PK\x01\x02")

    def refused(content: bytes, reason: str) -> None:
        path = tmp_path / "hostile.pt"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"hostile\.pt: .*{reason}"):
            TorchFile(path)

    def changed(at: int, by: bytes) -> bytes:
        return good[:at] + by + good[at + len(by) :]

    refused(b"", "0 bytes")
    refused(good + b"x", "does not end as")
    refused(saved(tmp_path, {"a": torch.ones(2)}, _use_new_zipfile_serialization=False).read_bytes(), "before 1.6")
    refused(pickled(tmp_path, good).read_bytes(), "malformed pickle")  # an archive within an archive
    refused(changed(directory + 10, b"\x08"), "compressed")
    refused(changed(directory + 8, b"\x01"), "encrypted")
    refused(changed(directory + 20, b"\xff\xff\xff\x00" * 2), "entries end at byte")
    refused(changed(directory + 42, b"\xff\xff\xff\x00"), "beyond the last")
    refused(changed(directory + 42, b"\x01"), "has another name")
    refused(changed(len(good) - 14, b"\xff\xff\xff\x7f"), "not within the file|at most")
    refused(changed(len(good) - 14, b"\xff\xff"), "at most 4096|ends within|not within")
    refused(good.replace(b"layer/byteorder", b"layer/data/zzzz").replace(b"data.pkl", b"data.xyz"), "data.pkl")
    refused(good.replace(b"little", b"bigger"), "little-endian")
    path = pickled(tmp_path, tensor((2, 3), (3, 1)))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("layer/data/1", bytes(8))
    apart = path.read_bytes()
    refused(apart.replace((24).to_bytes(4, "little") * 2, (70).to_bytes(4, "little") * 2), "data/1' overlaps another")


def test_damaged_files_are_refused_or_read_and_never_anything_else(tmp_path: Path):
    good, chance = saved(tmp_path, torch.nn.Linear(3, 2).state_dict()).read_bytes(), random.Random(1)
    path = tmp_path / "damaged.pt"
    refusals = 0
    for _ in range(300):
        content = bytearray(good[: chance.choice([len(good), chance.randrange(len(good))])])
        for _ in range(chance.randrange(1, 4)):
            content[chance.randrange(len(content)) if content else 0 : 0] = b""
            if content:
                content[chance.randrange(len(content))] = chance.randrange(256)
        path.write_bytes(content)
        try:
            contents(path)
        except CheckpointError:
            refusals += 1
    assert refusals > 150
