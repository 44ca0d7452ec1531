"""What suits a file system: threads, one flush, its page cache, and transfers past it.

Direct transfers go through buffers that the disk reads at once. What makes them fast is the huge
page under the buffer; with ordinary pages they are slower than buffered writing.

Source: open(2), O_DIRECT; the transparent huge page advice of madvise(2); cachestat(2); syncfs(2).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.storage.files import file_errors
from dist_ckpt_strategies.storage.io_pool import limited

Bytes = npt.NDArray[np.uint8]

BLOCK_NBYTES = 4096
"""Offsets, sizes and addresses are multiples of this; no disk has larger logical blocks."""

MIN_DIRECT_NBYTES = 64 << 10
"""Smaller files gain nothing."""

BUFFER_NBYTES = 6 << 20
"""Of a bounce buffer; some whole huge pages."""

_HUGE_PAGE_NBYTES = 2 << 20

_MAX_WAITING_NBYTES = 256 << 20
"""Unwritten data on the machine, ours not yet among it, that a flush may have to wait for."""

_FIRST_TO_REPORT = (5, 8)
"""The first version of Linux whose syncfs reports errors."""

_BEGIN_WRITEBACK = 2
"""SYNC_FILE_RANGE_WRITE."""

_NOT_SUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}

_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"} | _IN_MEMORY
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMORY_INFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class FileAccess:
    """What suits a kind of file system.

    Attributes:
        num_write_threads: files written, and flushed, at the same time.
        num_metadata_threads: small files made at the same time; on a local file system
            more than one only get in each other's way.
        is_direct: whether large files go past the page cache.
        is_flushed_whole: whether all that was written may be flushed at once (whole_flush).
        kind: the type of the file system, such as ``ext4``; empty if it is not known.
    """

    num_write_threads: int
    num_metadata_threads: int
    is_direct: bool = False
    is_flushed_whole: bool = False
    kind: str = ""


_LOCAL_DISK = FileAccess(8, 1, is_direct=True, is_flushed_whole=True)
_MEMORY = FileAccess(1, 1)
_OTHER = FileAccess(16, 8)
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
    device = os.stat(directory).st_dev  # noqa: PTH116 - symmetrical with the major and minor below
    number, kind = f"{os.major(device)}:{os.minor(device)}", ""
    with suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        for line in mounts.splitlines():
            fields, _, source = line.partition(" - ")
            if fields.split()[2] == number:
                kind = source.split()[0]
                break
    access = _BY_TYPE.get(kind, _OTHER)
    return replace(
        access,
        kind=kind,
        is_direct=access.is_direct and options.direct_io,
        is_flushed_whole=access.is_flushed_whole and options.whole_flush,
    )


@cache
def _c_library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@limited
def whole_flush(directory: Path) -> Callable[[], None] | None:
    """A flush of the directory's file system, to be called when everything has been written.

    Make it before anything is written. None where files are better flushed one by one: where the
    C library has no syncfs or the kernel's reports no errors, and where much of others waits to be
    written, or the kernel does not say how much.

    Raises:
        StorageError: the directory cannot be opened. The flush raises it if some of what was
            written could not be, ours or another's.
    """
    syncfs = getattr(_c_library(), "syncfs", None)
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if syncfs is None or version < _FIRST_TO_REPORT:
        return None
    try:
        memory = _MEMORY_INFO.read_text(encoding="ascii")
    except OSError:
        return None
    waiting = re.findall(r"^(?:Dirty|Writeback): +(\d+)", memory, re.MULTILINE)
    if not waiting or 1024 * sum(map(int, waiting)) > _MAX_WAITING_NBYTES:
        return None
    with file_errors(None, directory):
        handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)

    def flush() -> None:
        with file_errors(None, directory):
            if syncfs(handle) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"flush of its file system: {os.strerror(number)}")

    weakref.finalize(flush, os.close, handle)
    return flush


@dataclass(frozen=True, slots=True)
class PageCache:
    """What processes of one host read a directory through; they share it if names are equal.

    ``is_storage``: it is the storage itself, a file system in memory.
    """

    name: str
    is_storage: bool


@limited
def page_cache_of(directory: Path) -> PageCache | None:
    """The page cache that a directory on a local file system is read through; None elsewhere.

    None too where the system does not say: a directory that is missing is for its reader to report.
    """
    try:
        name = directory_name(directory)
    except OSError:
        return None
    kind = file_access(directory, Options()).kind
    return PageCache(name, kind in _IN_MEMORY) if kind in _LOCAL else None


def directory_name(directory: Path) -> str:
    """The same for all processes that see this directory of this machine, and for no others.

    An OSError if it is not there, or the system does not say.
    """
    found = directory.stat()
    boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"{boot_id} {found.st_dev} {found.st_ino}"


def available_nbytes() -> int:
    """Memory that this process could still get, pages of the cache that can be dropped included.

    The limit of its control group counts; 0 where the system does not say.
    """
    found = 0
    with suppress(OSError, ValueError):  # no control group of version 2, or no limit: "max"
        found = 1024 * _number(_MEMORY_INFO, "MemAvailable:")
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        found = min(found, limit - _number(_CONTROL_GROUP / "memory.stat", "anon"))
    return found


def _number(path: Path, name: str) -> int:
    """The number after a name in a file of ``/proc`` or ``/sys``; 0 where it has none."""
    found = re.search(rf"^{name} +(\d+)", path.read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) if found else 0


def begin_writeback(handle: int, byte_offset: int, nbytes: int) -> None:
    """Have a range of a file written, and do not wait; nothing where the system cannot."""
    call = getattr(_c_library(), "sync_file_range", None)
    if call is not None:
        call(handle, ctypes.c_int64(byte_offset), ctypes.c_int64(nbytes), _BEGIN_WRITEBACK)


@dataclass
class BounceBuffers:
    """Buffers for threads at work, made as they are first needed.

    Takes one for each thread that has work at the same time, freed with the object.
    """

    _idle: deque[Bytes] = field(default_factory=deque)

    @contextmanager
    def borrowed(self, nbytes: int = BUFFER_NBYTES) -> Iterator[Bytes]:
        """A buffer of so many bytes or more that is this thread's alone within the block.

        It is aligned, unless it has to be larger than BUFFER_NBYTES.
        """
        if nbytes > BUFFER_NBYTES:
            yield np.empty(nbytes, np.uint8)
            return
        try:
            buffer = self._idle.pop()
        except IndexError:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, BUFFER_NBYTES + _HUGE_PAGE_NBYTES, flags=flags)
            with suppress(OSError, AttributeError):  # a kernel without transparent huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
            whole = np.frombuffer(memory, np.uint8)
            start = -whole.ctypes.data % _HUGE_PAGE_NBYTES
            buffer = whole[start : start + BUFFER_NBYTES]
            buffer.fill(0)
        try:
            yield buffer
        finally:
            self._idle.append(buffer)


def start_direct(handle: int) -> bool:
    """Switch an open file to direct transfers; False where its file system has none."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno in _NOT_SUPPORTED:
            return False
        raise
    return True


def stop_direct(handle: int) -> None:
    """Switch an open file back to buffered transfers."""
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)
