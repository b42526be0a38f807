"""Quantize a checkpoint tensor by tensor: memory holds some rows of one matrix, or a matrix of a transposed stack."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import torch

from infd.errors import CheckpointError
from infd.gguf import is_gguf
from infd.models.decoder import ROOTS
from infd.quantize.files import Entry, SafetensorsWriter, new_directory, require_absent
from infd.quantize.plan import ignored, plan
from infd.quantize.schemes import SCHEMES, described, quantize
from infd.quantize.stacks import Piece
from infd.weights.checkpoint import INDEX, Checkpoint
from infd.weights.formats.plain import CHUNK_BYTES, PlainReader
from infd.weights.stored import StoredTensor
from infd.weights.views import PlainView, bytes_read, is_slice, sliced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from infd.models.parameter import View
    from infd.quantize.schemes import Scheme

    Progress = Callable[[int, int], None]

# Files beside the weights that are copied, by ending. Weights in other formats are not.
COPIED: Final = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".md", "LICENSE", "NOTICE", "encoding_dsv32.py")
REPLACED: Final = ("config.json", INDEX)


class Written(NamedTuple):
    """The result of `convert`.

    matrices    number of quantized matrices
    calibrated  number of these whose scales a text chose
    before      bytes of the checkpoint's weights; `after`: of the written weights
    """

    matrices: int
    calibrated: int
    before: int
    after: int


def convert(
    directory: Path,
    out: Path,
    name: str,
    progress: Progress = lambda done, total: None,
    importance: Mapping[str, Tensor] | None = None,
) -> Written:
    """Write the checkpoint in `directory` to the new directory `out`, quantized by the scheme of this name.

    progress    called with (bytes read, bytes to read)
    importance  see `quantize` in schemes.py, by the matrix's name within the decoder (`calibration.measure`); a matrix
                without importance is rounded to nearest

    Raises CheckpointError, UsageError, OutputFailed.
    """
    scheme, importance = SCHEMES[name], importance or {}
    with new_directory(out) as partial, Checkpoint(directory) as checkpoint:
        planned = plan(checkpoint, name)
        matrices = planned.matrices
        files: dict[str, list[tuple[StoredTensor, Piece]]] = {}
        for stored in checkpoint.stored_order():
            assert isinstance(stored, StoredTensor)
            some = planned.pieces.get(stored.name, {"": Piece(stored.name, stored.shape)})
            files.setdefault(stored.file.path.name, []).extend((stored, piece) for piece in some.values())
        entries = {
            file: [
                entry for stored, piece in parts for entry in _entries(stored, piece, piece.name in matrices, scheme)
            ]
            for file, parts in files.items()
        }
        total, done = sum(bytes_read(*each) for parts in files.values() for each in _read(parts)), 0

        def report(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        reader = PlainReader(report)
        for file, parts in files.items():
            with SafetensorsWriter(partial / file, entries[file]) as writer:
                for stored, piece in parts:
                    if piece.name in matrices:
                        _quantize(writer, reader, stored, piece, scheme, importance.get(within_decoder(piece.name)))
                    elif piece.view is not None:
                        _copy_rows(writer, reader, stored, piece)
                    else:
                        _copy(writer, stored, report)
        if (directory / INDEX).exists() and list(files) != ["model.safetensors"]:
            _write_json(partial / INDEX, _index(entries))
        config = {**checkpoint.config, "quantization_config": described(scheme, ignored(checkpoint, matrices))}
        _write_json(partial / "config.json", config)
        _copy_texts(directory, partial)
        calibrated = sum(within_decoder(each) in importance for each in matrices)
        before = sum(each.bytes for each in checkpoint.stored_order())
        after = sum(entry.bytes for some in entries.values() for entry in some)
        return Written(len(matrices), calibrated, before, after)


def refuse(directory: Path, out: Path, name: str) -> None:
    """Raise the error that `convert` would raise before it reads weights, if any."""
    require_absent(out)
    if is_gguf(directory) and not directory.is_dir():
        raise CheckpointError(f"{directory} is a GGUF file; name the directory of a checkpoint in safetensors")
    with Checkpoint(directory) as checkpoint:
        plan(checkpoint, name)


def require_measured(directory: Path, name: str, importance: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError, which names a matrix, if calibration did not measure all that `convert` would quantize."""
    with Checkpoint(directory) as checkpoint:
        matrices = plan(checkpoint, name).matrices
    missing = sorted(each for each in matrices if within_decoder(each) not in importance)
    if missing:
        raise CheckpointError(
            f"{directory}: calibration did not measure {len(missing)} of the {len(matrices)} matrices to quantize, such"
            f" as {missing[0]}, because transformers names them otherwise; leave out --calibration to round to nearest"
        )


def within_decoder(name: str) -> str:
    """Return a tensor's name without the decoder's prefix."""
    root = max((root for root in ROOTS if name.startswith(root)), key=len)
    return name.removeprefix(root)


def _read(parts: Iterable[tuple[StoredTensor, Piece]]) -> Iterator[tuple[StoredTensor, View | None]]:
    return ((stored, piece.view) for stored, piece in parts)


def _entries(stored: StoredTensor, piece: Piece, chosen: bool, scheme: Scheme) -> Iterator[Entry]:
    if not chosen:
        yield Entry(piece.name, stored.dtype, piece.shape)
        return
    module, (outputs, inputs) = piece.name.removesuffix(".weight"), piece.shape
    for part in scheme.parts(outputs, inputs):
        yield Entry(module + part.suffix, part.dtype, part.shape)


def _rows(reader: PlainReader, stored: StoredTensor, piece: Piece) -> Iterator[tuple[int, Tensor]]:
    """Yield a piece in chunks: (index of the first row, rows)."""
    if piece.view is None:
        return reader.rows(stored)
    if is_slice(piece.view):
        return reader.rows(sliced(stored, piece.view))
    return PlainView(reader, piece.view).rows(stored)


def _quantize(
    writer: SafetensorsWriter,
    reader: PlainReader,
    stored: StoredTensor,
    piece: Piece,
    scheme: Scheme,
    importance: Tensor | None,
) -> None:
    module, (outputs, inputs) = piece.name.removesuffix(".weight"), piece.shape
    for part in scheme.parts(outputs, inputs):
        if part.suffix == ".weight_shape":
            writer.write(module + part.suffix, _bytes(torch.tensor([outputs, inputs])))
    for first, rows in _rows(reader, stored, piece):
        if not rows.isfinite().all():
            raise CheckpointError(f"{stored.file.path}: {stored.name}: some weights are not finite")
        for suffix, content in quantize(scheme, rows, importance).items():
            width = content.element_size() * content.shape[1]
            writer.write(module + suffix, _bytes(content), first * width)


def _copy_rows(writer: SafetensorsWriter, reader: PlainReader, stored: StoredTensor, piece: Piece) -> None:
    for first, rows in _rows(reader, stored, piece):
        writer.write(piece.name, _bytes(rows), first * rows[0].nbytes)


def _copy(writer: SafetensorsWriter, stored: StoredTensor, report: Callable[[int], None]) -> None:
    buffer = memoryview(bytearray(min(CHUNK_BYTES, stored.bytes)))
    for start in range(0, stored.bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, stored.bytes - start)]
        stored.read(chunk, start)
        writer.write(stored.name, chunk, start)
        report(len(chunk))


def _bytes(tensor: Tensor) -> memoryview:
    content: memoryview = tensor.contiguous().view(torch.uint8).numpy().data.cast("B")
    return content


def _index(entries: Mapping[str, list[Entry]]) -> dict[str, Any]:
    size = sum(entry.bytes for some in entries.values() for entry in some)
    files = {entry.name: file for file, some in entries.items() for entry in some}
    return {"metadata": {"total_size": size}, "weight_map": files}


def _write_json(path: Path, content: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _copy_texts(directory: Path, out: Path) -> None:
    """Copy tokenizer, template and other small files, links as the files that they name."""
    for path in sorted(directory.rglob("*")):
        below = path.relative_to(directory)
        hidden = any(each.startswith(".") for each in below.parts)
        if hidden or len(below.parts) > 2 or str(below) in REPLACED or not path.name.endswith(COPIED):
            continue
        if path.is_file():
            (out / below).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, out / below)
