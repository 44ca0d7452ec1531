"""Objects of a checkpoint, pickled and unpickled.

The only place that unpickles, and never freely. Loads torch only where that is needed.
"""

import io
import pickle
import re
import struct
import sys
import threading
import zipfile
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path, PosixPath
from signal import Signals
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import numpy as np

from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    PlanError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)

_REFUSED_FLAGS = 0x2061
"""Encrypted, patched, masked: torch's reader refuses such entries."""

_DOS_DIRECTORY = 0x10
"""An entry with this attribute is read by torch as an empty directory, without an error."""

_END_BYTES = 22
"""Length of the record at an archive's end, which torch writes without a comment."""

_SHARDED = frozenset({"ShardedTensor", "ShardedObject", "ShardedTensorFactory"})
"""Megatron-Core's classes; they have a key, which torch's ShardedTensor has not."""

_UNSAFE = re.compile(
    r"(?<=GLOBAL )\S+|(?<=allowlisted via `add_safe_globals`, but got <class ')[^']+(?='>)"
)
"""In torch's message: the first class of an older file, or one that no name in it stands for."""

_UNPICKLER_SAYS = re.compile(r"WeightsUnpickler error:\s*(.*)")
"""In torch's message; what stands before it advises to unpickle freely."""

_NOT_A_MEMBER = re.compile(r"(\S+) is not a valid (\w+)$")

Allowed = Sequence[Any]
"""Classes and functions that may be unpickled, or (class, "module.name it was pickled as")."""

_CHANGES_LIST = threading.Lock()
"""Held while torch's list of allowed classes changes."""


def default_allowed() -> list[Any]:
    """The classes that a checkpoint may need when it is unpickled, beside Megatron-Core's own.

    Those of other packages in Megatron-Core's list, and numpy's arrays under the names of numpy 1
    and 2: they are rebuilt by ``_reconstruct`` and ``scalar``, which moved from ``numpy.core`` to
    ``numpy._core``, and a checkpoint names the module of its writer. Pickles call ``bytes`` for
    what is empty.
    """
    multiarray = np._core.multiarray  # type: ignore[attr-defined]  # noqa: SLF001 - what pickles name
    named = [
        (rebuild, f"{module}.{rebuild.__name__}")
        for rebuild in (multiarray._reconstruct, multiarray.scalar)  # noqa: SLF001
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    ]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    plain = [bytes, SimpleNamespace, Namespace, PosixPath, io.BytesIO, Signals]
    return [*plain, np.ndarray, np.dtype, *dtypes, *named]


def file_damage(file: IO[bytes]) -> str | None:
    """Describes damage of a zip archive that ``torch.save`` made; None if it is whole.

    Every record is compared with the archive's own checksum of it, and its entry in the archive's
    directory with what torch's reader takes. Reads the file once, in blocks. Files of the older,
    non-zip form carry no checksum and pass.
    """
    head = file.read(2)
    if head != b"PK":
        return None if head.startswith(b"\x80") else "it is not a file that torch.save wrote"
    try:
        file.seek(max(file.seek(0, io.SEEK_END) - _END_BYTES, 0))
        if not file.read().startswith(b"PK\5\6"):
            return "its end is missing, or bytes follow it"
        with zipfile.ZipFile(file) as archive:
            if bad := archive.testzip():
                return f"checksum mismatch in its record {bad}"
            for entry in archive.infolist():  # torch's reader would refuse it, or read it wrongly
                if (
                    entry.compress_type != zipfile.ZIP_STORED
                    or entry.compress_size != entry.file_size
                    or entry.flag_bits & _REFUSED_FLAGS
                    or entry.external_attr & _DOS_DIRECTORY
                    or entry.volume
                    or entry.comment
                ):
                    return f"the entry of its record {entry.filename} is not torch's"
            return None
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


def require_archive(content: bytes, path: Path | str, name: str) -> None:
    """Raise CorruptCheckpointError unless it is an archive that fits its own checksums."""
    if damage := file_damage(io.BytesIO(content)):
        raise _corrupt(name, path, damage)


def leaves(obj: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Each value in nested containers and objects, once, and its path, such as ``args.lr[1]``."""
    seen, held = set() if seen is None else seen, dict[Any, Any]()
    if id(obj) in seen:
        return
    seen.add(id(obj))
    if isinstance(obj, list | tuple | set | frozenset):
        ordered = obj if isinstance(obj, list | tuple) else sorted(obj, key=repr)
        held = {f"[{number}{_key_text(value)}]": value for number, value in enumerate(ordered)}
    elif isinstance(obj, dict):
        held = {f".{k}" if isinstance(k, str) else f"[{k!r}]": v for k, v in obj.items()}
    elif is_dataclass(obj) and not isinstance(obj, type):
        held = {f".{part.name}": getattr(obj, part.name, None) for part in fields(obj)}
    elif not (isinstance(obj, type | Enum | ModuleType) or hasattr(obj, "untyped_storage")):
        held = {f".{name}": value for name, value in getattr(obj, "__dict__", {}).items()}
    if not held:
        yield path, obj
    for name, value in held.items():
        yield from leaves(value, f"{path}{name}".removeprefix("."), seen)


def _key_text(value: Any) -> str:
    """The key of a shard, for the path to it."""
    key = getattr(value, "key", None)
    return f": {key}" if isinstance(key, str) else ""


def dump_object(obj: Any, *, name: str, keeps_meta: bool = False) -> bytes:
    """The object as ``torch.save`` writes it; ``keeps_meta``: with tensors on the meta device.

    Raises:
        StorageError: it holds something that cannot be pickled.
        PlanError: it holds a tensor without memory: torch would write that, and not read it. Or
            a ShardedTensor, of which all ranks would be given the first one's.
    """
    import torch  # noqa: PLC0415 - takes a while, and scans go without

    from dist_ckpt_strategies.device import lacking_storage  # noqa: PLC0415 - the same

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            kind = type(value)
            if kind.__name__ in _SHARDED and hasattr(value, "key") and not keeps_meta:
                raise PlanError(
                    f"{name}: {value.key}: a {kind.__name__} in a tuple or an object; "
                    "Megatron-Core takes those in dicts and lists alone: put it into one",
                    key=str(value.key),
                )
            is_checked = isinstance(value, torch.Tensor) and not (keeps_meta and value.is_meta)
            if is_checked and (lack := lacking_storage(value)):
                path = next((path for path, held in leaves(obj) if held is value), "")
                key = f"{name}: {path}" if path else name
                raise PlanError(f"{key}: {lack}", key=key)
            return NotImplemented

    buffer = io.BytesIO()
    try:
        pickler: Any = SimpleNamespace(Pickler=Pickler, __name__=pickle.__name__)
        torch.save(obj, buffer, pickler)
    except PlanError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        path = ""
        with suppress(Exception):  # whatever else is wrong with it
            path = next((path for path, held in leaves(obj) if not _is_picklable(held)), "")
        where = f"{name}: {path}" if path else name
        raise StorageError(f"{where} cannot be saved: {text}", key=name) from error
    return buffer.getvalue()


def _is_picklable(value: Any) -> bool:
    if hasattr(value, "untyped_storage"):  # a tensor: checked elsewhere, and large
        return True
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - whatever a foreign __reduce__ raises
        return False
    return True


def dump_loadable(obj: Any, *, name: str, allow: Allowed) -> bytes:
    """Like ``dump_object``, for an object that a load with these classes gives back.

    Raises:
        UnsafeObjectError: it needs a class that is not allowed.
        StorageError: it cannot be pickled, or not be unpickled.
    """
    content = dump_object(obj, name=name)
    require_loadable(content, name=name, allow=allow)
    return content


def require_loadable(content: bytes, *, name: str, allow: Allowed) -> None:
    """Raise what ``dump_loadable`` raises, for what ``dump_object`` has returned."""
    with allowing(_allowed_for(content, allow)):
        try:
            _unpickled(content)
        except Exception as error:
            unsafe = _unsafe_error(error, content, name)
            text = f"{name} cannot be saved: a load would fail: {error}"
            raise unsafe or StorageError(text, key=name) from error


_MODULES_IN_MEGATRONS_LIST = (b"megatron.core", b"torch._C")
"""Of the classes in the lists of its releases that are not in ``default_allowed``."""


def _allowed_for(content: bytes, allow: Allowed) -> Allowed:
    """These, and Megatron-Core's list: if it is imported, which takes 7 s of a CPU, or named."""
    if "megatron.core" not in sys.modules and (
        not any(module in content for module in _MODULES_IN_MEGATRONS_LIST)
        or find_spec("megatron") is None
        or find_spec("megatron.core") is None
    ):
        return allow
    from dist_ckpt_strategies.megatron.types import megatron_classes  # noqa: PLC0415 - slow

    return [*allow, *megatron_classes()]


def _unpickled(content: bytes) -> Any:
    """The object, its tensors on the CPU; within ``allowing``."""
    import torch  # noqa: PLC0415 - takes a while, and scans go without

    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


@contextmanager
def allowing(allow: Allowed) -> Iterator[None]:
    """Within the block these may be unpickled; what others allow stays allowed after it.

    torch's list is one for the process, and its own context manager takes off, on leaving, also
    what others have put there, or another thread still needs: so each call has entries of its own.

    Raises:
        StrategyError: something in it is neither a class, a function, nor such a tuple.
    """
    import torch  # noqa: PLC0415 - takes a while, and scans go without

    context: Any = torch.serialization.safe_globals([_Entry(_by_name(item)) for item in allow])
    with _CHANGES_LIST:
        context.__enter__()
    try:
        yield
    finally:
        with _CHANGES_LIST:
            context.__exit__(None, None, None)


class _Entry(tuple[Any, str]):
    """An entry in torch's list that is equal to no other, so that it goes without taking one."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _by_name(entry: Any) -> tuple[Any, str]:
    """An allowed class or function, and its name in a pickle."""
    if isinstance(entry, tuple) and list(map(type, entry[1:])) == [str]:
        entry, name = entry
    else:
        parts = [getattr(entry, field, None) for field in ("__module__", "__qualname__")]
        name = None if None in parts else ".".join(map(str, parts))
    if name is None or not (callable(entry) or isinstance(entry, Enum)):
        raise StrategyError(
            f"allow: expected classes, functions or (class, name) tuples, found {entry!r}"
        )
    return entry, name


def load_content(
    content: bytes, path: Path | str, name: str, allow: Allowed, *, is_whole: bool = False
) -> Any:
    """The object that ``dump_object`` made bytes of, its tensors on the CPU.

    ``is_whole``: they have been compared with a digest.

    Raises:
        UnsafeObjectError: it needs a class that is not in ``allow``.
        CorruptCheckpointError: they are not what ``torch.save`` wrote.
        IncompatibleVersionError: it needs a member of an enum that the installed release lacks.
    """
    if not is_whole:
        require_archive(content, path, name)
    with allowing(_allowed_for(content, allow)):
        try:
            return _unpickled(content)
        except Exception as error:
            raise _load_error(error, content, path, name) from error


def _load_error(error: Exception, content: bytes, path: Path | str, name: str) -> CheckpointError:
    if unsafe := _unsafe_error(error, content, name, path):
        return unsafe
    if lost := _NOT_A_MEMBER.search(str(error)):
        return IncompatibleVersionError(
            f"{name}: {path} holds a {lost[2]} with the value {lost[1]}, which the installed "
            f"release lacks; say what stands for it with a classmethod {lost[2]}._missing_, or "
            "load with the release that wrote it",
            key=name,
        )
    said = _UNPICKLER_SAYS.search(str(error))
    return _corrupt(name, path, (said[1] if said else str(error)) or "it cannot be unpickled")


def _unsafe_error(
    error: Exception, content: bytes, name: str, path: Path | str | None = None
) -> UnsafeObjectError | None:
    """The error for classes that are not allowed; None where it has another reason."""
    import torch  # noqa: PLC0415 - takes a while, and scans go without

    if not isinstance(error, pickle.UnpicklingError):
        return None
    missing: list[str] = []
    with suppress(Exception):  # a file that is too old or broken to list its classes
        missing += torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content))
    missing = missing or _UNSAFE.findall(str(error))
    if not missing:
        return None
    classes = ", ".join(sorted(missing))
    where = name if path is None else f"{name}: {path}"
    return UnsafeObjectError(
        f"{where} needs {classes}, which the list of classes allowed to be unpickled does not "
        f"hold; if you trust this checkpoint, pass allow=[{classes}] to what saves and "
        "loads it (save, load, register, install, manager, PackStorageWriter, PackStorageReader), "
        "or call torch.serialization.add_safe_globals",
        key=name,
        path=None if path is None else str(path),
    )


def _corrupt(name: str, path: Path | str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{name}: {path} is damaged: {why}", key=name, path=str(path))
