"""Object files by name and by their own checksums: everything about them but unpickling.

Imports no torch, so that tools which only look at a checkpoint start at once.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dist_ckpt_strategies.spec.object import UNKNOWN, ObjectId
from dist_ckpt_strategies.storage.disk.files import (
    REMOVED_PREFIX,
    file_errors,
    is_directory,
    is_elsewhere,
    remove_empty,
)

OBJECT_SUFFIX = ".pt"

_ENTRY = struct.Struct("<28x3H12x")
"""Sizes of name, extra field and comment, within the fixed part of a directory entry."""

_REFUSED_FLAGS = 0x2061
"""Encrypted, patched, masked: torch's reader refuses such entries."""

_DOS_DIRECTORY = 0x10
"""An entry with this attribute is read by torch as an empty directory, without an error."""

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


def object_ids(root: Path) -> Iterator[ObjectId]:
    """Every object shard below a checkpoint, sorted; names of the older form are completed.

    An older name lacks the last number of the grid's shape: it is one more than the largest
    offset found, as Megatron-Core concludes.
    """
    by_key: dict[str, list[ObjectId]] = {}
    for object_id in _named_ids(root, ""):
        by_key.setdefault(object_id.key, []).append(object_id)
    for key in sorted(by_key):
        last = max(object_id.offset[-1] for object_id in by_key[key]) + 1
        for object_id in sorted(by_key[key]):
            shape = object_id.shape
            if shape[-1] == UNKNOWN:
                shape = (*shape[:-1], last)
            yield ObjectId(key, object_id.offset, shape)


def object_path(root: Path, object_id: ObjectId) -> Path:
    """The file of a shard that ``object_ids`` yielded."""
    path = root / (object_id.unique_key + OBJECT_SUFFIX)
    older = root / (object_id.older_key + OBJECT_SUFFIX)
    return path if path.exists() or not older.exists() else older


def remove_object(root: Path, object_id: ObjectId) -> None:
    """Remove one shard of an object, durably; directories that it leaves empty go too."""
    path = object_path(root, object_id)
    with file_errors(object_id.key, path):
        path.unlink(missing_ok=True)
        remove_empty(path.parent, root)


def _named_ids(directory: Path, prefix: str) -> Iterator[ObjectId]:
    with file_errors(prefix, directory), os.scandir(directory) as scan:
        entries = list(scan)
    for entry in entries:
        if entry.name.startswith(REMOVED_PREFIX):
            continue
        if entry.name.endswith(OBJECT_SUFFIX):
            found = ObjectId.parse(prefix + entry.name.removesuffix(OBJECT_SUFFIX))
            if found is not None:
                yield found
        elif is_directory(entry) and not is_elsewhere(entry):
            yield from _named_ids(Path(entry.path), f"{prefix}{entry.name}/")


def archive_damage(content: bytes) -> str | None:
    """What is wrong with the bytes of a ``.pt`` file; see file_damage."""
    return file_damage(io.BytesIO(content))


def file_damage(file: IO[bytes]) -> str | None:
    """What is wrong with the zip archive that ``torch.save`` makes; None where nothing is.

    Every record is compared with the archive's own checksum of it, and the archive's directory
    with what torch's reader needs. Reads the file once, in pieces. Files of the older, non-zip
    form carry no checksum and pass.
    """
    head = file.read(2)
    if head != b"PK":
        return None if head.startswith(b"\x80") else "it is not a file that torch.save wrote"
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
            return f"checksum mismatch in its record {bad}" if bad else _misfit(archive, file)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        OSError,
        ValueError,
        RuntimeError,
        OverflowError,
        struct.error,
    ) as error:
        return str(error) or type(error).__name__


def _misfit(archive: zipfile.ZipFile, file: IO[bytes]) -> str | None:
    """Where the archive differs from what ``torch.save`` writes, outside of its records."""
    entries = archive.infolist()
    for entry in entries:
        if _is_foreign(entry):
            return f"the directory entry of its record {entry.filename} is not torch's"
    nbytes = _directory_nbytes(file, archive.start_dir, len(entries))
    file.seek(archive.start_dir + nbytes)
    end = file.read(_END64.size + _LOCATOR.size + _END.size + 1)
    if not _is_end(end, len(entries), archive.start_dir, nbytes):
        return "its end does not fit its directory; bytes are changed, missing or too many"
    return None


def _is_foreign(entry: zipfile.ZipInfo) -> bool:
    return bool(
        entry.compress_type != zipfile.ZIP_STORED
        or entry.compress_size != entry.file_size
        or entry.flag_bits & _REFUSED_FLAGS
        or entry.external_attr & _DOS_DIRECTORY
        or entry.volume
        or entry.comment
    )


def _directory_nbytes(file: IO[bytes], start: int, num_entries: int) -> int:
    """Bytes of the archive's directory, by the sizes that its entries state."""
    end = start
    for _ in range(num_entries):
        file.seek(end)
        end += _ENTRY.size + sum(_ENTRY.unpack(file.read(_ENTRY.size)))
    return end - start


def _is_end(found: bytes, num_entries: int, start: int, nbytes: int) -> bool:
    """Whether the bytes after the directory are those that belong to it, and all that follow."""
    count = min(num_entries, _MAX16)
    end = _END.pack(b"PK\5\6", 0, 0, count, count, min(nbytes, _MAX32), min(start, _MAX32), 0)
    if found == end:
        return True
    if len(found) < _END64.size:
        return False
    _, _, made_by, needed, *_ = _END64.unpack_from(found)
    end64 = _END64.pack(
        b"PK\6\6", 44, made_by, needed, 0, 0, num_entries, num_entries, nbytes, start
    )
    return found == end64 + _LOCATOR.pack(b"PK\6\7", 0, start + nbytes, 1) + end
