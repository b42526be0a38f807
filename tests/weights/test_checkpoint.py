"""Checkpoints whose headers and bytes disagree are refused."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from infd.errors import CheckpointError
from infd.weights.checkpoint import HEADER_BYTES, Checkpoint, TensorFile
from tests.weights.checkpoints import raw, safetensors, write, write_sharded

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(8)
DIGITS = b"9" * 5000  # Python converts no longer text to an integer


@pytest.fixture
def file(tmp_path):
    """Return a function that writes bytes to a file and opens it, closing it at the end."""
    opened = []

    def open_file(content: bytes) -> TensorFile:
        path = tmp_path / "some.safetensors"
        path.write_bytes(content)
        opened.append(TensorFile(path))
        return opened[-1]

    yield open_file
    for each in opened:
        each.close()


def content(checkpoint: Checkpoint, name: str) -> bytes:
    stored = checkpoint.tensors[name]
    buffer = bytearray(stored.bytes)
    stored.read(memoryview(buffer))
    return bytes(buffer)


def test_tensors_are_read_as_written(tmp_path):
    a, b = torch.arange(6, dtype=torch.float32).view(2, 3), torch.tensor([1.5], dtype=torch.bfloat16)
    with Checkpoint(write(tmp_path, {"b": b, "a": a}, {"x": 1})) as checkpoint:
        assert checkpoint.config == {"x": 1}
        assert {name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()} == {
            "a": ("F32", (2, 3)),
            "b": ("BF16", (1,)),
        }
        assert content(checkpoint, "a") == a.numpy().tobytes()
        assert [stored.name for stored in checkpoint.stored_order()] == ["b", "a"]


def test_a_file_that_safetensors_wrote_is_read(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(3, 2), "empty": torch.empty(0, 4)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint(tmp_path) as checkpoint:
        assert content(checkpoint, "w") == torch.ones(6).numpy().tobytes()
        assert checkpoint.tensors["empty"].bytes == 0


def test_shards_are_found_through_the_index(tmp_path):
    shards = {"b.safetensors": {"x": torch.ones(1)}, "a.safetensors": {"y": torch.zeros(2), "z": torch.zeros(1)}}
    with Checkpoint(write_sharded(tmp_path, shards)) as checkpoint:
        assert [(t.name, t.file.path.name) for t in checkpoint.stored_order()] == [
            ("y", "a.safetensors"),
            ("z", "a.safetensors"),
            ("x", "b.safetensors"),
        ]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b"", "expected a safetensors file, found 0 bytes"),
        (raw({}, length=100), "the header claims 100 bytes"),
        (raw({}, length=2**64 - 1), "the header claims 18446744073709551615 bytes"),
        (raw(b"[1]"), "malformed header"),
        (raw(b'{"a": '), "malformed header"),
        (raw(b'{"\xff": 1}'), "malformed header"),
        (raw(b'{"a": ' + b"[" * 100_000), "malformed header"),
        (raw(b'{"__metadata__": {"dtype": %b}}' % DIGITS), "malformed header"),
        (
            raw(b'{"a": {"dtype": "F32", "shape": [%b, %b], "data_offsets": [0, 8]}}' % ((DIGITS[:4000],) * 2), EIGHT),
            "malformed header",
        ),
        (raw({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), "malformed header"),
        (raw({"a": {**F32, "shape": [-2]}}, EIGHT), "malformed header"),
        (raw({"a": {**F32, "shape": [2.0]}}, EIGHT), "malformed header"),
        (raw({"a": {**F32, "shape": [1] * 17}}, EIGHT), "malformed header"),
        (raw({"a": {**F32, "data_offsets": [-8, 0]}}, EIGHT), "malformed header"),
        (raw({"a": {**F32, "data_offsets": [0, 8, 16]}}, EIGHT), "malformed header"),
        (raw({"a": {**F32, "dtype": "F33"}}, EIGHT), "a: unknown dtype 'F33'"),
        (raw({"a": {**F32, "shape": [3]}}, EIGHT), r"a: F32 \[3\] takes 12 bytes, its offsets \[0, 8\] hold 8"),
        (raw({"a": {**F32, "shape": [2**62] * 16}}, EIGHT), "a: F32 .* takes"),
        (raw({"a": {**F32, "data_offsets": [8, 0]}}, EIGHT), "a: F32"),
        (raw(b'{"a": %b, "a": %b}' % ((json.dumps(F32).encode(),) * 2), EIGHT), "a occurs twice in the header"),
        (raw(b'{"a": {"shape": [3], %b}' % json.dumps(F32).encode()[1:], EIGHT), "shape occurs twice"),
        (raw({"a": F32}, bytes(7)), "the header describes .* bytes, the file has"),
        (raw({"a": F32}, bytes(9)), "the header describes .* bytes, the file has"),
        (raw({"a": F32, "b": F32}, bytes(16)), "b: overlaps the previous tensor"),
        (raw({"a": {**F32, "data_offsets": [2**40, 2**40 + 8]}}, EIGHT), "a: leaves a gap after the previous tensor"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(file, broken, message):
    with pytest.raises(CheckpointError, match=rf"some\.safetensors: {message}"):
        file(broken)


def test_a_header_larger_than_any_real_one_is_not_even_read(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as sparse:
        sparse.write((HEADER_BYTES + 1).to_bytes(8, "little"))
        sparse.truncate(HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match=f"at most {HEADER_BYTES} are read"):
        TensorFile(path)


def test_a_refused_file_is_closed_again(file):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError):
        file(b"")
    assert len(os.listdir("/proc/self/fd")) == before


SOUND = safetensors({"a": torch.ones(2), "b": torch.ones(2, 2, dtype=torch.bfloat16)})


@given(at=st.integers(0, len(SOUND) - 1), change=st.binary(min_size=1, max_size=6))
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_refused_or_stays_within_itself(file, at, change):
    damaged = SOUND[:at] + change + SOUND[at + len(change) :]
    try:
        opened = file(damaged)
    except CheckpointError:
        return
    for tensor in opened.tensors:
        assert tensor.offset >= 8
        assert tensor.offset + tensor.bytes <= len(damaged)
        tensor.read(memoryview(bytearray(tensor.bytes)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "F4"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "I8"]) | json_values,
        "shape": st.lists(st.integers(-1, 3) | st.integers(), max_size=4) | json_values,
        "data_offsets": st.tuples(st.integers(-1, 40), st.integers(-1, 40)) | json_values,
    }
)


@given(header=st.dictionaries(st.text(max_size=4), entries | json_values, max_size=4), body=st.integers(0, 40))
@example(header={"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 0]}}, body=0)
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_header_is_refused_or_describes_its_file(file, header, body):
    try:
        opened = file(raw(header, bytes(body)))
    except CheckpointError:
        return
    assert sum(tensor.bytes for tensor in opened.tensors) == body


def test_no_weights_at_all_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: No such file"):
        Checkpoint(tmp_path)


def test_weights_of_another_kind_are_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match=r"there is pytorch_model\.bin, but infd reads safetensors and GGUF only"):
        Checkpoint(tmp_path)


def test_shards_are_read_in_the_order_in_which_people_count(tmp_path):
    shards = {f"model-{part}.safetensors": {f"w{part}": torch.ones(1)} for part in (10, 9, 100, 2)}
    with Checkpoint(write_sharded(tmp_path, shards)) as checkpoint:
        assert [stored.name for stored in checkpoint.stored_order()] == ["w2", "w9", "w10", "w100"]


def test_a_missing_config_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": ' + "[" * 100_000, '"\\ud800"'])
def test_a_malformed_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: malformed"):
        Checkpoint(tmp_path)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "expected a weight_map"),
        ({"weight_map": []}, "expected a weight_map"),
        ({"weight_map": {"x": "../x.safetensors"}}, "x: expected the name of a file, found '../x.safetensors'"),
        ({"weight_map": {"x": "/x.safetensors"}}, "x: expected the name of a file"),
        ({"weight_map": {"x": "x\0"}}, "x: expected the name of a file"),
        ({"weight_map": {"x": ".."}}, "not a regular file"),
        ({"weight_map": {"x": 1}}, "x: expected the name of a file, found 1"),
        ({"weight_map": {"x": "gone.safetensors"}}, r"gone\.safetensors: No such file"),
        (
            {"weight_map": {"w": "a.safetensors"}},
            r"w should be in a\.safetensors, which does not hold it",
        ),
        ({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}, r"b\.safetensors: x is in a\.safetensors too"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, index, message):
    write_sharded(tmp_path, {"a.safetensors": {"x": torch.ones(1)}, "b.safetensors": {"x": torch.ones(1)}})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    with Checkpoint(write(tmp_path, {"w": torch.ones(100)})) as checkpoint:
        os.truncate(tmp_path / "model.safetensors", 100)
        with pytest.raises(CheckpointError, match="became shorter"):
            content(checkpoint, "w")
