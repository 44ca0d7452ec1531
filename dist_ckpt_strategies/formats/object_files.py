"""Objects in files: names, checksums, and values that need no pickle. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dist_ckpt_strategies.core.array import UNKNOWN, ObjectId
from dist_ckpt_strategies.errors import ArrayNotFoundError
from dist_ckpt_strategies.storage.files import (
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    is_directory,
    is_elsewhere,
    read_file,
    remove_empty,
)
from dist_ckpt_strategies.storage.io_pool import limited

OBJECT_SUFFIX = ".pt"

_PLAIN_LEAD = b"json:"
"""No pickle and no archive starts like this."""

_REFUSED_FLAGS = 0x2061
"""Encrypted, patched, masked: torch's reader refuses such entries."""

_DOS_DIRECTORY = 0x10
"""An entry with this attribute is read by torch as an empty directory, without an error."""


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


def shard_id(path: str) -> ObjectId | None:
    """The shard in a file of that path below a checkpoint; None where the name is none of a shard.

    The last number of the shape is UNKNOWN in a name of the older form.
    """
    if not path.endswith(OBJECT_SUFFIX):
        return None
    found = ObjectId.parse(path.removesuffix(OBJECT_SUFFIX))
    return found if found is not None and shard_path(found) == path else None


def shard_path(object_id: ObjectId) -> str:
    """The file of a shard that ``shard_id`` gives, below the checkpoint."""
    is_older = object_id.shape[-1] == UNKNOWN
    return (object_id.older_key if is_older else object_id.unique_key) + OBJECT_SUFFIX


@limited
def object_path(root: Path, object_id: ObjectId) -> Path:
    """The file of a shard that ``object_ids`` yielded."""
    path = root / (object_id.unique_key + OBJECT_SUFFIX)
    older = root / (object_id.older_key + OBJECT_SUFFIX)
    return path if path.exists() or not older.exists() else older


@limited
def read_content(root: Path, object_id: ObjectId) -> bytes:
    """The bytes of the file of one shard of an object, to be loaded by ``load_pickle``.

    Raises:
        ArrayNotFoundError: there is no such shard.
    """
    path = object_path(root, object_id)
    with file_errors(object_id.unique_key, path, not_found=ArrayNotFoundError):
        return read_file(path)


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
        if entry.name.startswith((REMOVED_PREFIX, PARTIAL_PREFIX)):
            continue
        if entry.name.endswith(OBJECT_SUFFIX):
            found = ObjectId.parse(prefix + entry.name.removesuffix(OBJECT_SUFFIX))
            if found is not None:
                yield found
        elif is_directory(entry) and not is_elsewhere(entry):
            yield from _named_ids(Path(entry.path), f"{prefix}{entry.name}/")


def file_damage(file: IO[bytes]) -> str | None:
    """What is wrong with the zip archive that ``torch.save`` makes; None where nothing is.

    Every record is compared with the archive's own checksum of it, and its entry in the archive's
    directory with what torch's reader takes. Reads the file once, in blocks. Files of the older,
    non-zip form carry no checksum and pass.
    """
    head = file.read(2)
    if head != b"PK":
        return None if head.startswith(b"\x80") else "it is not a file that torch.save wrote"
    try:
        with zipfile.ZipFile(file) as archive:
            if bad := archive.testzip():
                return f"checksum mismatch in its record {bad}"
            foreign = next(filter(_is_foreign, archive.infolist()), None)
            return f"the entry of its record {foreign.filename} is not torch's" if foreign else None
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


def _is_foreign(entry: zipfile.ZipInfo) -> bool:
    """Whether torch's reader would refuse the entry, or read it wrongly."""
    return bool(
        entry.compress_type != zipfile.ZIP_STORED
        or entry.compress_size != entry.file_size
        or entry.flag_bits & _REFUSED_FLAGS
        or entry.external_attr & _DOS_DIRECTORY
        or entry.volume
        or entry.comment
    )


def is_plain(obj: Any) -> bool:
    """Whether JSON gives an object back as it is."""
    if type(obj) is list:
        return all(map(is_plain, obj))
    if type(obj) is dict:
        return all(type(key) is str and is_plain(held) for key, held in obj.items())
    return (
        obj is None or type(obj) in {bool, int, str} or (type(obj) is float and math.isfinite(obj))
    )


def plain_content(obj: Any) -> bytes:
    """What stands for an object that JSON gives back as it is."""
    return _PLAIN_LEAD + json.dumps(obj, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class Plain:
    """A value that JSON gives back as it is."""

    value: Any


def plain_value(content: bytes) -> Plain | None:
    """The value that ``plain_content`` stands for; None of what is pickled, or damaged."""
    if not content.startswith(_PLAIN_LEAD):
        return None
    try:
        return Plain(json.loads(content[len(_PLAIN_LEAD) :]))
    except (ValueError, RecursionError):
        return None
