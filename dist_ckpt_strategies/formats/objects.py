"""Objects in ``.pt`` files: the only place that unpickles, and never freely."""

from __future__ import annotations

import io
import pickle
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.object_files import (
    OBJECT_SUFFIX,
    file_damage,
    is_plain,
    object_path,
    plain_content,
    plain_value,
    read_content,
)
from dist_ckpt_strategies.storage.files import file_errors, write_file
from dist_ckpt_strategies.storage.io_pool import limited

_UNSAFE_GLOBAL = re.compile(r"GLOBAL (\S+)")
"""In torch's message; of a file in the older form torch lists no more than the first."""

_UNSAFE_BUILD = re.compile(r"allowlisted via `add_safe_globals`, but got <class '([^']+)'>")
"""In torch's message: of a class that no name in the file stands for."""

_UNPICKLER_SAYS = re.compile(r"WeightsUnpickler error:\s*(.*)")
"""In torch's message; what stands before it advises to unpickle freely."""

_NOT_A_MEMBER = re.compile(r"(\S+) is not a valid (\w+)$")

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
    content = read_content(root, object_id)
    return load_pickle(content, object_path(root, object_id), object_id.unique_key, allow)


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


def load_content(content: bytes, path: Path | str, name: str, allow: Allowed) -> Any:
    """The object that ``dump_object`` or ``dump_content`` made bytes of; see load_pickle."""
    plain = plain_value(content)
    return load_pickle(content, path, name, allow) if plain is None else plain.value


def load_pickle(content: bytes, path: Path | str, name: str, allow: Allowed) -> Any:
    """The object that the bytes of a ``.pt`` file hold, its tensors on the CPU.

    Raises:
        UnsafeObjectError: it needs a class that is not in ``allow``.
        CorruptCheckpointError: they are not what ``torch.save`` wrote.
        IncompatibleVersionError: it needs a member of an enum that the installed release lacks.
    """
    damage = file_damage(io.BytesIO(content))
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
    said = _UNPICKLER_SAYS.search(str(error))
    why = (said[1] if said else str(error)) or "it cannot be unpickled"
    return (
        _unsafe_error(error, content, name, path)
        or _lost_member_error(error, path, name, allow)
        or _corrupt(name, path, why)
    )


def _lost_member_error(
    error: Exception, path: Path | str, name: str, allow: Allowed
) -> IncompatibleVersionError | None:
    """The error for a member that an enum no longer has; None where it has another reason."""
    said = _NOT_A_MEMBER.search(str(error))
    enums = (kind for kind in allow if isinstance(kind, type) and issubclass(kind, Enum))
    kind = next((one for one in enums if said and one.__qualname__ == said[2]), None)
    if said is None or kind is None:
        return None
    return IncompatibleVersionError(
        f"{name}: {path} holds the member of {_name_of(kind)} with the value {said[1]}, which the "
        "installed release lacks; before the load say what stands for it, such as "
        f"{said[2]}._missing_ = classmethod(lambda cls, value: {next(iter(kind))}), or load with "
        "the release that wrote it",
        key=name,
    )


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
