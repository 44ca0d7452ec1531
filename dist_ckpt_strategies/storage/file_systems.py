"""What suits a file system: threads, direct transfers, one flush; and its page cache."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.storage.files import file_errors
from dist_ckpt_strategies.storage.io_pool import limited


@dataclass(frozen=True, slots=True)
class FileAccess:
    """What suits a kind of file system.

    Attributes:
        num_read_threads: files read at the same time.
        num_write_threads: files written, and flushed, at the same time.
        num_metadata_threads: small files made or read at the same time; on a local file system
            more than one only get in each other's way.
        is_direct: whether large files go past the page cache (direct_io).
        is_flushed_whole: whether all that was written may be flushed at once (whole_flush).
    """

    num_read_threads: int
    num_write_threads: int
    num_metadata_threads: int
    is_direct: bool = False
    is_flushed_whole: bool = False


_LOCAL_DISK = FileAccess(4, 8, 1, is_direct=True, is_flushed_whole=True)
_MEMORY = FileAccess(1, 1, 1)
_OTHER = FileAccess(8, 16, 8)
"""Network file systems: each file waits for a server, so that more of them hide more of it."""

_BY_TYPE = {
    "ext2": replace(_LOCAL_DISK, is_flushed_whole=False),  # its own driver leaves the disk's cache
    "ext3": _LOCAL_DISK,
    "ext4": _LOCAL_DISK,
    "xfs": _LOCAL_DISK,
    "ramfs": _MEMORY,
    "tmpfs": _MEMORY,
}


@limited
def file_access(directory: Path, options: Options) -> FileAccess:
    """What suits the file system of a directory, or of the nearest one above that exists.

    As far as the options permit it.
    """
    while not directory.exists():
        directory = directory.parent
    access = _BY_TYPE.get(file_system_type(directory) or "", _OTHER)
    return replace(
        access,
        is_direct=access.is_direct and options.direct_io,
        is_flushed_whole=access.is_flushed_whole and options.whole_flush,
    )


def file_system_type(path: Path) -> str | None:
    """The type of the file system that a path is on, such as ``ext4``; None if it is not known."""
    device = os.stat(path).st_dev  # noqa: PTH116 - symmetrical with the major and minor below
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in mounts.splitlines():
        fields, _, source = line.partition(" - ")
        if fields.split()[2] == number:
            return source.split()[0]
    return None


_CACHESTAT = 451
"""Its number on the architectures below."""

_ARCHITECTURES = {"x86_64", "aarch64"}
_NUM_COUNTS = 5
_LOOK = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer
_NO_NOWAIT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}

_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"} | _IN_MEMORY
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMORY_INFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class PageCache:
    """What processes of one host read a directory through.

    Attributes:
        name: equal where processes share it.
        is_storage: whether it is the storage itself: a file system in memory.
    """

    name: str
    is_storage: bool


@limited
def page_cache_of(directory: Path) -> PageCache | None:
    """The page cache that a directory on a local file system is read through; None elsewhere.

    None too where the system does not say: a directory that is missing is for its reader to report.
    """
    try:
        kind = file_system_type(directory)
        found = directory.stat()
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None
    if kind not in _LOCAL:
        return None
    return PageCache(f"{boot_id} {found.st_dev} {found.st_ino}", kind in _IN_MEMORY)


def available_nbytes() -> int:
    """Memory that this process could still get, pages of the cache that can be dropped included.

    The limit of its control group counts; 0 where the system does not say.
    """
    found = 1024 * _numbers(_MEMORY_INFO).get("MemAvailable:", 0)
    with suppress(OSError, ValueError):  # no control group of version 2, or no limit: "max"
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        found = min(found, limit - _numbers(_CONTROL_GROUP / "memory.stat").get("anon", 0))
    return found


def _numbers(path: Path) -> dict[str, int]:
    """The first number of each line of a file in ``/proc`` or ``/sys``, by the word before it."""
    found = {}
    with suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            name, number, *_ = line.split()
            found[name] = int(number)
    return found


def is_cached(handle: int, size: int) -> bool:
    """Whether the middle of a file is in the page cache; True where the kernel cannot tell."""
    call, counts = _system_call(), (ctypes.c_uint64 * _NUM_COUNTS)()
    asked = (ctypes.c_uint64 * 2)(size // 2, 1)
    if call is not None and call(_CACHESTAT, handle, asked, counts, 0) == 0:
        return counts[0] > 0
    try:  # before Linux 6.5, and where this user may not ask
        os.preadv(handle, [bytearray(1)], size // 2, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_NOWAIT:
            raise
    return True


def begin_readahead(paths: Sequence[str]) -> None:
    """Announce files that are read next, and do not wait; nothing where the first is cached."""
    for number, path in enumerate(paths):
        try:
            handle = os.open(path, _LOOK)
        except OSError:
            continue
        try:
            if number == 0 and is_cached(handle, 0):
                return
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:
            continue
        finally:
            os.close(handle)


@cache
def _system_call() -> Callable[..., int] | None:
    if platform.system() != "Linux" or platform.machine() not in _ARCHITECTURES:
        return None
    call = ctypes.CDLL(None).syscall
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint,
    )
    call.restype = ctypes.c_long
    found: Callable[..., int] = call
    return found


_MAX_WAITING_NBYTES = 256 << 20
"""Unwritten data on the machine, ours not yet among it, that a flush may have to wait for."""

_FIRST_TO_REPORT = (5, 8)


class WholeFlush:
    """One flush, to be made before anything is written, and run after everything is.

    Raises:
        StorageError: the directory cannot be opened.
    """

    def __init__(self, directory: Path, syncfs: Callable[[int], int]) -> None:
        self._directory = directory
        self._syncfs = syncfs
        with file_errors(None, directory):
            self._handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._handle)

    def run(self) -> None:
        """Return once all that was written to the file system is durable.

        Raises:
            StorageError: some of it could not be written, ours or another's.
        """
        with file_errors(None, self._directory):
            if self._syncfs(self._handle) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"flush of its file system: {os.strerror(number)}")


@limited
def whole_flush(directory: Path) -> WholeFlush | None:
    """The flush of the directory's file system; None where files are better flushed one by one.

    That is where the C library has no syncfs or the kernel's reports no errors, and where much of
    others waits to be written, or the kernel does not say how much.
    """
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if platform.system() != "Linux" or version < _FIRST_TO_REPORT:
        return None
    found = _numbers(_MEMORY_INFO)
    if "Dirty:" not in found:
        return None
    if 1024 * (found["Dirty:"] + found.get("Writeback:", 0)) > _MAX_WAITING_NBYTES:
        return None
    library: Any = ctypes.CDLL(None, use_errno=True)
    syncfs = getattr(library, "syncfs", None)
    return None if syncfs is None else WholeFlush(directory, syncfs)
