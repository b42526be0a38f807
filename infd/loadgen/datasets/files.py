"""Read a user's file into calls: JSON, JSONL, plain lines, or BurstGPT's CSV."""

from __future__ import annotations

import csv
import json
import math
import random
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from infd.loadgen.datasets.call import Block, Call, DatasetError, Outline
from infd.loadgen.datasets.records import READERS, recognize
from infd.loadgen.datasets.spec import DEFAULT_OUTPUT_TOKENS, TRACES, File

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infd.loadgen.datasets.spec import Shape

_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")


def calls(spec: File, count: int, seed: int | str) -> list[Call]:
    """Return `count` of the file's requests.

    A trace gives its first `count` requests, fewer if it has fewer. Other files are repeated if they have fewer.
    Raises DatasetError.
    """
    found = list(_calls(spec))
    if not found:
        raise DatasetError(f"{spec.path}: no request in it")
    if spec.shape in TRACES:
        if not all(math.isfinite(call.at_s or 0.0) for call in found):
            raise DatasetError(f"{spec.path}: a request's time is not finite")
        found.sort(key=lambda call: call.at_s or 0.0)
        return found[:count]
    if spec.shuffle:
        random.Random(f"order {seed}").shuffle(found)  # noqa: S311 - reproducible, not secret
    return [found[number % len(found)] for number in range(count)]


def recognized(path: str) -> Shape:
    """Return the shape of a file, by its first record. Raises DatasetError."""
    text = _text(path)
    if text.startswith(_BURSTGPT[0] + ","):
        return "burstgpt"
    for where, record in _records(path, text):
        return recognize(record, where)
    raise DatasetError(f"{path}: no request in it")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            return file.read()
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DatasetError(f"{path}: not a text file in UTF-8") from None


def _calls(spec: File) -> Iterator[Call]:
    text = _text(spec.path)
    if spec.shape == "burstgpt":
        try:
            yield from (_with_length(call, spec) for call in _burstgpt(spec.path, text))
        except csv.Error as error:
            raise DatasetError(f"{spec.path}: not CSV: {error}") from None
        return
    for where, record in _records(spec.path, text):
        try:
            call = READERS[spec.shape](record)
        except msgspec.ValidationError as error:
            raise DatasetError(f"{where}: not of the shape {spec.shape}: {error}") from None
        if call is not None:
            yield _with_length(call, spec)


def _with_length(call: Call, spec: File) -> Call:
    if spec.output_tokens is not None:
        return structs.replace(call, output_tokens=spec.output_tokens, reply="")
    known = call.output_tokens is not None or call.reply or call.body
    return call if known else structs.replace(call, output_tokens=DEFAULT_OUTPUT_TOKENS)


def _records(path: str, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each record with its place for messages. A file that ends in .txt has a prompt a line."""
    plain = path.endswith(".txt")
    if not plain and text.lstrip().startswith("["):
        listed = _json(text, path)
        yield from ((f"{path}, record {number}", record) for number, record in enumerate(listed, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        if plain:
            yield where, line.strip()
        else:
            yield where, _json(line, where, " (a file of plain lines ends in .txt)")


def _json(text: str, where: str, advice: str = "") -> Any:
    """Return the value of a JSON text. Raises DatasetError, at the line of a text of several lines."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = where if error.lineno == 1 else f"{where}, line {error.lineno}"
        raise DatasetError(f"{at}: not JSON: {error.msg}{advice}") from None
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, and deep nesting
        raise DatasetError(f"{where}: not read: {error}") from None


def _burstgpt(path: str, text: str) -> Iterator[Call]:
    """Read the columns Timestamp (seconds), Request tokens and Response tokens.

    Failed requests, which have no response tokens, are left out.
    """
    rows = csv.DictReader(text.splitlines())
    missing = [name for name in _BURSTGPT if name not in (rows.fieldnames or ())]
    if missing:
        raise DatasetError(f"{path}, line 1: a BurstGPT trace has a column {missing[0]!r}")
    for number, row in enumerate(rows, 2):
        try:
            at_s, tokens, output = float(row[_BURSTGPT[0]]), int(row[_BURSTGPT[1]]), int(row[_BURSTGPT[2]])
        except (TypeError, ValueError):
            raise DatasetError(f"{path}, line {number}: {', '.join(_BURSTGPT)} must be numbers") from None
        if tokens > 0 and output > 0:
            outline = Outline((Block(f"row {number}", tokens),))
            yield Call(prompt=outline, output_tokens=output, at_s=at_s)
