"""Objects in ``.pt`` files: the only place that unpickles, and never freely."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.spec.object import UNKNOWN, ObjectId
from dist_ckpt_strategies.storage.files import (
    REMOVED_PREFIX,
    file_errors,
    sync_directory,
    write_file,
)

COMMON_NAME = "common.pt"
_SUFFIX = ".pt"

Allowed = Sequence[Any]
"""Classes and functions that may be unpickled, or (class, "module.name it was pickled as")."""


def dump_object(obj: Any, *, name: str) -> bytes:
    """The object as ``torch.save`` writes it.

    Raises:
        StorageError: it holds something that cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise StorageError(f"{name} cannot be saved: {error}", key=name) from error
    return buffer.getvalue()


def write_object(root: Path, object_id: ObjectId, obj: Any) -> int:
    """Store one shard of an object, durably; returns its size in bytes."""
    path = root / (object_id.unique_key + _SUFFIX)
    content = dump_object(obj, name=object_id.unique_key)
    with file_errors(object_id.key, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)
    return len(content)


def read_object(root: Path, object_id: ObjectId, allow: Allowed) -> Any:
    """Load one shard of an object, its tensors on the CPU.

    The older name, without the last number of the shape, is accepted.

    Raises:
        ArrayNotFoundError: there is no such shard.
        UnsafeObjectError: it needs a class that is not in ``allow``.
        CorruptCheckpointError: the file is not what ``torch.save`` wrote.
    """
    path = root / (object_id.unique_key + _SUFFIX)
    if not path.exists():
        older = root / (object_id.older_key + _SUFFIX)
        path = older if older.exists() else path
    return read_pickle(path, object_id.unique_key, allow)


def read_pickle(path: Path, name: str, allow: Allowed) -> Any:
    """Load a ``.pt`` file with ``weights_only=True``, the allow-list, and tensors on the CPU."""
    with file_errors(name, path, not_found=ArrayNotFoundError):
        content = path.read_bytes()
    return load_pickle(content, path, name, allow)


def load_pickle(content: bytes, path: Path, name: str, allow: Allowed) -> Any:
    """The object that the bytes of a ``.pt`` file hold; see read_pickle."""
    damage = archive_damage(content)
    if damage:
        raise _corrupt(name, path, damage)
    with torch.serialization.safe_globals(list(allow)):
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            raise _load_error(error, content, path, name) from error


def archive_damage(content: bytes) -> str | None:
    """What is wrong with the zip archive that ``torch.save`` makes, by its own checksums.

    Files of the older, non-zip form carry no checksum and pass.
    """
    if not content.startswith(b"PK"):
        return None if content.startswith(b"\x80") else "it is not a file that torch.save wrote"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        return str(error) or type(error).__name__
    return None if bad is None else f"checksum mismatch in its record {bad}"


def _load_error(error: Exception, content: bytes, path: Path, name: str) -> CheckpointError:
    missing = _unsafe_globals(content)
    if isinstance(error, pickle.UnpicklingError) and missing:
        classes = ", ".join(missing)
        return UnsafeObjectError(
            f"{name}: {path} needs {classes}, which the list of classes allowed to be unpickled "
            f"does not hold; if you trust this checkpoint, pass allow=[{classes}] to "
            "dist_ckpt_strategies.load or register, or torch.serialization.add_safe_globals",
            key=name,
            path=str(path),
        )
    return _corrupt(name, path, str(error))


def _unsafe_globals(content: bytes) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)))
    except Exception:  # noqa: BLE001 - a file too broken to list is reported by the caller
        return []


def _corrupt(name: str, path: Path, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name}: {path} is damaged: {why}", key=name, path=str(path))


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
    path = root / (object_id.unique_key + _SUFFIX)
    older = root / (object_id.older_key + _SUFFIX)
    return path if path.exists() or not older.exists() else older


def remove_object(root: Path, object_id: ObjectId) -> None:
    """Remove one shard of an object, durably."""
    path = object_path(root, object_id)
    with file_errors(object_id.key, path):
        path.unlink(missing_ok=True)
        sync_directory(path.parent)


def _named_ids(directory: Path, prefix: str) -> Iterator[ObjectId]:
    with file_errors(prefix, directory), os.scandir(directory) as scan:
        entries = list(scan)
    for entry in entries:
        if entry.name.startswith(REMOVED_PREFIX):
            continue
        if entry.name.endswith(_SUFFIX):
            found = ObjectId.parse(prefix + entry.name.removesuffix(_SUFFIX))
            if found is not None:
                yield found
        elif entry.is_dir():
            yield from _named_ids(Path(entry.path), f"{prefix}{entry.name}/")
