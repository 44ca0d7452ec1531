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
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.object_files import (
    OBJECT_SUFFIX,
    archive_damage,
    object_ids,
    object_path,
    remove_object,
)
from dist_ckpt_strategies.storage.files import file_errors, read_file, write_file
from dist_ckpt_strategies.storage.io_pool import limited

__all__ = [
    "Allowed",
    "archive_damage",
    "dump_content",
    "dump_loadable",
    "dump_object",
    "is_plain",
    "load_content",
    "load_pickle",
    "object_ids",
    "object_path",
    "plain_content",
    "plain_value",
    "read_content",
    "read_object",
    "read_pickle",
    "remove_object",
    "write_dumped",
]

_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""In torch's message; of a file in the older form torch lists no more than the first."""

_UNSAFE_BUILD = re.compile(r"allowlisted via `add_safe_globals`, but got <class '([^']+)'>")
"""In torch's message: of a class that no name in the file stands for."""

_UNPICKLER_SAYS = re.compile(r"WeightsUnpickler error:\s*(.*)")
"""In torch's message; what stands before it advises to unpickle freely."""

_NOT_A_MEMBER = re.compile(r"(\S+) is not a valid (\w+)$")

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


def dump_loadable(obj: Any, *, name: str, allow: Allowed) -> bytes:
    """Like ``dump_object``, for an object that a load with these classes gives back.

    Raises:
        UnsafeObjectError: it needs a class that is not allowed.
        StorageError: it cannot be pickled, or not be unpickled.
    """
    content = dump_object(obj, name=name)
    with allowing(allow):
        try:
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            unsafe = _unsafe_error(error, content, name)
            text = f"{name} cannot be saved: a load would fail: {error}"
            raise unsafe or StorageError(text, key=name) from error
    return content


@limited
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


@limited
def read_content(root: Path, object_id: ObjectId) -> bytes:
    """The bytes of the file of one shard of an object, to be loaded by ``load_pickle``.

    Raises:
        ArrayNotFoundError: there is no such shard.
    """
    path = object_path(root, object_id)
    with file_errors(object_id.unique_key, path, not_found=ArrayNotFoundError):
        return read_file(path)


@limited
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

    Raises:
        IncompatibleVersionError: it needs a member of an enum that the installed release lacks.
    """
    damage = archive_damage(content)
    if damage:
        raise _corrupt(name, path, damage)
    with allowing(allow):
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:
            raise _load_error(error, content, path, name, allow) from error


def _load_error(
    error: Exception, content: bytes, path: Path | str, name: str, allow: Allowed
) -> CheckpointError:
    unsafe = _unsafe_error(error, content, name, path)
    if unsafe is not None:
        return unsafe
    lost = _lost_member_error(error, path, name, allow)
    if lost is not None:
        return lost
    said = _UNPICKLER_SAYS.search(str(error))
    return _corrupt(name, path, (said[1] if said else str(error)) or "it cannot be unpickled")


def _lost_member_error(
    error: Exception, path: Path | str, name: str, allow: Allowed
) -> IncompatibleVersionError | None:
    """The error for a member that an enum no longer has; None where it has another reason."""
    said = _NOT_A_MEMBER.search(str(error))
    enums = [kind for kind in allow if isinstance(kind, type) and issubclass(kind, Enum)]
    for kind in enums:
        if said is not None and kind.__qualname__ == said[2]:
            return IncompatibleVersionError(
                f"{name}: {path} holds the member of {_name_of(kind)} with the value {said[1]}, "
                "which the installed release lacks; before the load say what stands for it, such "
                f"as {said[2]}._missing_ = classmethod(lambda cls, value: {next(iter(kind))}), or "
                "load with the release that wrote it",
                key=name,
            )
    return None


def _unsafe_error(
    error: Exception, content: bytes, name: str, path: Path | str | None = None
) -> UnsafeObjectError | None:
    """The error for classes that are not allowed; None where it has another reason."""
    missing = _unsafe_globals(content) or [
        name for says in (_UNSAFE_GLOBAL, _UNSAFE_BUILD) for name in says.findall(str(error))
    ]
    if not (isinstance(error, pickle.UnpicklingError) and missing):
        return None
    classes = ", ".join(missing)
    where = name if path is None else f"{name}: {path}"
    return UnsafeObjectError(
        f"{where} needs {classes}, which the list of classes allowed to be unpickled does not "
        f"hold; if you trust this checkpoint, pass allow=[{classes}] to dist_ckpt_strategies.save "
        "and load, or to register, or call torch.serialization.add_safe_globals",
        key=name,
        path=None if path is None else str(path),
    )


def _unsafe_globals(content: bytes) -> list[str]:
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)))
    except Exception:  # noqa: BLE001 - a file too broken to list is reported by the caller
        return []


def _corrupt(name: str, path: Path | str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name}: {path} is damaged: {why}", key=name, path=str(path))
