"""Objects in ``.pt`` files: the only place that unpickles, and never freely."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.disk.files import file_errors, read_file, write_file
from dist_ckpt_strategies.storage.objects.files import (
    OBJECT_SUFFIX,
    archive_damage,
    object_ids,
    object_path,
    remove_object,
)
from dist_ckpt_strategies.storage.objects.former_members import asking_elsewhere

__all__ = [
    "Allowed",
    "archive_damage",
    "dump_content",
    "dump_object",
    "is_plain",
    "load_content",
    "load_pickle",
    "names_of",
    "object_ids",
    "object_path",
    "plain_content",
    "plain_value",
    "read_content",
    "read_object",
    "read_pickle",
    "remove_object",
    "write_dumped",
    "write_object",
]

_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""In torch's message; of a file in the older form torch lists no more than the first."""

_UNSAFE_BUILD = re.compile(r"allowlisted via `add_safe_globals`, but got <class '([^']+)'>")
"""In torch's message: of a class that no name in the file stands for."""

_UNPICKLER_SAYS = re.compile(r"WeightsUnpickler error:\s*(.*)")
"""In torch's message; what stands before it advises to unpickle freely."""

_PLAIN_LEAD = b"json:"
"""No pickle and no archive starts like this."""

Allowed = Sequence[Any]
"""Classes and functions that may be unpickled, or (class, "module.name it was pickled as")."""


_ALLOWING = threading.Lock()
_NUM_USERS: Counter[Any] = Counter()
_HELD: dict[Any, Any] = {}
"""What is on torch's list because of us, with the context that takes it off again."""


def dump_object(obj: Any, *, name: str) -> bytes:
    """The object as ``torch.save`` writes it.

    Raises:
        StorageError: it holds something that cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(obj, buffer)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise StorageError(f"{name} cannot be saved: {text}", key=name) from error
    return buffer.getvalue()


def write_object(root: Path, object_id: ObjectId, obj: Any) -> int:
    """Store one shard of an object, durably; returns its size in bytes."""
    content = dump_object(obj, name=object_id.unique_key)
    write_dumped(root, object_id, content)
    return len(content)


def write_dumped(root: Path, object_id: ObjectId, content: bytes) -> None:
    """Store what ``dump_object`` made of one shard of an object, durably."""
    path = root / (object_id.unique_key + OBJECT_SUFFIX)
    with file_errors(object_id.key, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content)


def read_object(root: Path, object_id: ObjectId, allow: Allowed) -> Any:
    """Load one shard of an object, its tensors on the CPU.

    The older name, without the last number of the shape, is accepted.

    Raises:
        ArrayNotFoundError: there is no such shard.
        UnsafeObjectError: it needs a class that is not in ``allow``.
        CorruptCheckpointError: the file is not what ``torch.save`` wrote.
    """
    return read_pickle(object_path(root, object_id), object_id.unique_key, allow)


def read_content(root: Path, object_id: ObjectId) -> bytes:
    """The bytes of the file of one shard of an object, to be loaded by ``load_pickle``.

    Raises:
        ArrayNotFoundError: there is no such shard.
    """
    path = object_path(root, object_id)
    with file_errors(object_id.unique_key, path, not_found=ArrayNotFoundError):
        return read_file(path)


def read_pickle(path: Path, name: str, allow: Allowed) -> Any:
    """Load a ``.pt`` file with ``weights_only=True``, the allow-list, and tensors on the CPU."""
    with file_errors(name, path, not_found=ArrayNotFoundError):
        content = read_file(path)
    return load_pickle(content, path, name, allow)


@contextmanager
def allowing(allow: Allowed) -> Iterator[None]:
    """Within the block these may be unpickled; what others allow stays allowed after it.

    torch's list is one for the process, and its own context manager takes off, on leaving, also
    what others have put there meanwhile, or another thread still needs.

    Raises:
        StrategyError: something in it is neither a class, a function, nor such a tuple.
    """
    wanted = {_by_name(found) for found in allow}
    with _ALLOWING:
        for found in wanted.difference(_HELD):
            context: Any = torch.serialization.safe_globals([_Entry(found)])
            context.__enter__()
            _HELD[found] = context
        _NUM_USERS.update(wanted)
    try:
        yield
    finally:
        with _ALLOWING:
            _NUM_USERS.subtract(wanted)
            for found in [found for found in wanted if _NUM_USERS[found] == 0]:
                del _NUM_USERS[found]
                _HELD.pop(found).__exit__(None, None, None)


def names_of(allow: Allowed) -> dict[str, Any]:
    """What may be made again when a checkpoint is read, by the name that asks for it.

    Raises:
        StrategyError: something in it is neither a class, a function, nor such a tuple.
    """
    return {name: found for found, name in map(_by_name, allow)}


class _Entry(tuple[Any, str]):
    """An entry of ours in torch's list: equal to no other, so that it goes without taking one."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _by_name(found: Any) -> tuple[Any, str]:
    """What may be unpickled, and the name under which a pickle asks for it."""
    if isinstance(found, tuple) and list(map(type, found[1:])) == [str]:
        found, name = found
    else:
        name = _name_of(found)
    if not callable(found) or name is None:
        raise StrategyError(
            f"allow: expected classes, functions or (class, name) tuples, found {found!r}"
        )
    return found, name


def _name_of(found: Any) -> str | None:
    parts = [getattr(found, field, None) for field in ("__module__", "__qualname__")]
    return ".".join(map(str, parts)) if None not in parts else None


def dump_content(obj: Any, *, name: str) -> bytes:
    """What is stored of an object where JSON will do: exact values, nothing to be unpickled.

    Raises:
        StorageError: it holds something that cannot be pickled.
    """
    return plain_content(obj) if is_plain(obj) else dump_object(obj, name=name)


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
    """The value that ``plain_content`` stands for; None of what is pickled."""
    if not content.startswith(_PLAIN_LEAD):
        return None
    return Plain(json.loads(content[len(_PLAIN_LEAD) :]))


def load_content(content: bytes, path: Path | str, name: str, allow: Allowed) -> Any:
    """The object that ``dump_object`` or ``dump_content`` made bytes of; see read_pickle."""
    plain = plain_value(content)
    return load_pickle(content, path, name, allow) if plain is None else plain.value


def load_pickle(content: bytes, path: Path | str, name: str, allow: Allowed) -> Any:
    """The object that the bytes of a ``.pt`` file hold; see read_pickle.

    A member of an enum that a later release has dropped is its plain value, with a warning.
    """
    damage = archive_damage(content)
    if damage:
        raise _corrupt(name, path, damage)
    with allowing(allow):
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            anew = asking_elsewhere(content, error, allow)
            if anew is None:
                raise _load_error(error, content, path, name) from error
    content, entry = anew
    return load_pickle(content, path, name, [*allow, entry])


def _load_error(error: Exception, content: bytes, path: Path | str, name: str) -> CheckpointError:
    missing = _unsafe_globals(content) or [
        name for says in (_UNSAFE_GLOBAL, _UNSAFE_BUILD) for name in says.findall(str(error))
    ]
    if isinstance(error, pickle.UnpicklingError) and missing:
        classes = ", ".join(missing)
        return UnsafeObjectError(
            f"{name}: {path} needs {classes}, which the list of classes allowed to be unpickled "
            f"does not hold; if you trust this checkpoint, pass allow=[{classes}] to "
            "dist_ckpt_strategies.load or register, or torch.serialization.add_safe_globals",
            key=name,
            path=str(path),
        )
    said = _UNPICKLER_SAYS.search(str(error))
    return _corrupt(name, path, (said[1] if said else str(error)) or "it cannot be unpickled")


def _unsafe_globals(content: bytes) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)))
    except Exception:  # noqa: BLE001 - a file too broken to list is reported by the caller
        return []


def _corrupt(name: str, path: Path | str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name}: {path} is damaged: {why}", key=name, path=str(path))
