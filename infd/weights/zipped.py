"""The entries of a zip archive that stores them uncompressed, as torch.save writes it.

Archives are refused that are compressed, encrypted, commented or in several parts, or whose entries overlap. Nothing is
unpacked: an entry is a range of the file's bytes.
"""

from __future__ import annotations

from struct import Struct as Layout
from typing import TYPE_CHECKING, Final, NamedTuple

from infd.errors import CheckpointError

if TYPE_CHECKING:
    from infd.untrusted import WeightsFile

MOST_BYTES: Final = 2**31  # of an archive; larger ones have other structures
MOST_ENTRIES: Final = 4096
MOST_DIRECTORY_BYTES: Final = 2**20
ENCRYPTED: Final = 1  # flag

# Signature, disks, entries on this disk and in all, bytes and offset of the directory, bytes of the comment
_END = Layout("<4s4H2IH")
_ENTRY = Layout("<4s6H3I5H2I")
_LOCAL = Layout("<4s5H3I2H")


class Range(NamedTuple):
    """The bytes of an entry."""

    offset: int
    size: int


def entries(file: WeightsFile) -> dict[str, Range]:
    """Return the bytes of each entry, by name. Raises CheckpointError, which names the file and the reason."""
    size = file.size()
    if not _END.size <= size < MOST_BYTES:
        raise _error(file, f"{size} bytes; a zip archive of {_END.size} to {MOST_BYTES} bytes is read")
    signature, disk, start, here, count, length, first, comment = _END.unpack(_read(file, size - _END.size, _END.size))
    if signature != b"PK\x05\x06" or comment:
        raise _error(file, "it does not end as a zip archive of torch.save; files of torch before 1.6 are not read")
    if disk or start or here != count or count > MOST_ENTRIES or length > MOST_DIRECTORY_BYTES:
        raise _error(file, f"its directory has {count} entries in {length} bytes; at most {MOST_ENTRIES} are read")
    if first + length > size:
        raise _error(file, f"its directory, bytes {first} to {first + length}, is not within the file of {size} bytes")
    directory, found, at = _read(file, first, length), {}, 0
    for _ in range(count):
        if at + _ENTRY.size > length:
            raise _error(file, "its directory ends within an entry")
        fields = _ENTRY.unpack_from(directory, at)
        flags, method, packed, unpacked, header = fields[3], fields[4], fields[8], fields[9], fields[16]
        name_bytes, extra, note = fields[10:13]
        name = directory[at + _ENTRY.size : at + _ENTRY.size + name_bytes]
        at += _ENTRY.size + name_bytes + extra + note
        if fields[0] != b"PK\x01\x02" or at > length:
            raise _error(file, "its directory is malformed")
        named = name.decode("utf-8", "replace")
        if method or packed != unpacked or flags & ENCRYPTED:
            raise _error(file, f"entry {named[:80]!r} is compressed or encrypted; torch.save does neither")
        if named in found:
            raise _error(file, f"entry {named[:80]!r} is there twice")
        found[named] = _range(file, name, header, unpacked, first)
    end = 0
    for named, each in sorted(found.items(), key=lambda item: item[1]):
        if each.offset < end:
            raise _error(file, f"entry {named[:80]!r} overlaps another")
        end = each.offset + each.size
    return found


def _range(file: WeightsFile, name: bytes, header: int, size: int, end: int) -> Range:
    """Return the bytes of an entry whose local header is at `header`; all entries end before `end`."""
    shown = name.decode("utf-8", "replace")[:80]
    if header + _LOCAL.size + len(name) > end:
        raise _error(file, f"entry {shown!r} begins at byte {header}, beyond the last")
    local = _read(file, header, _LOCAL.size + len(name))
    fields = _LOCAL.unpack_from(local)
    if fields[0] != b"PK\x03\x04" or fields[9] != len(name) or local[_LOCAL.size :] != name:
        raise _error(file, f"entry {shown!r} has another name, or none, at byte {header}")
    offset = header + _LOCAL.size + fields[9] + fields[10]
    if offset + size > end:
        raise _error(file, f"entry {shown!r} takes {size} bytes from byte {offset}; the entries end at byte {end}")
    return Range(offset, size)


def _read(file: WeightsFile, offset: int, size: int) -> bytes:
    content = bytearray(size)
    file.read(memoryview(content), offset)
    return bytes(content)


def _error(file: WeightsFile, reason: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: {reason}")
