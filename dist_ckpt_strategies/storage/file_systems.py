"""A directory's page cache, its name among processes of a host, and free memory.

Source: proc(5), cgroup v2, sync_file_range(2).
"""

import ctypes
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_BEGIN_WRITEBACK = 2
"""SYNC_FILE_RANGE_WRITE."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"} | _IN_MEMORY
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMORY_INFO = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


@cache
def _c_library() -> Any:
    return ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class PageCache:
    """What processes of one host read a directory through; they share it if names are equal.

    ``is_storage``: it is the storage itself, a file system in memory.
    """

    name: str
    is_storage: bool


def page_cache_of(directory: Path) -> PageCache | None:
    """The page cache that a directory on a local file system is read through; None elsewhere.

    None too where the system does not say: a directory that is missing is for its reader to report.
    """
    try:
        name = directory_name(directory)
    except OSError:
        return None
    kind = _kind_of(directory)
    return PageCache(name, kind in _IN_MEMORY) if kind in _LOCAL else None


def _kind_of(directory: Path) -> str:
    """The type of its file system, such as ``ext4``; empty if it is not known."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        for line in mounts.splitlines():
            fields, _, source = line.partition(" - ")
            if fields.split()[2] == number:
                return source.split()[0]
    return ""


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
