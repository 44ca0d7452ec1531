"""Facts of this host: its processes, directories, memory and page cache.

Source: proc(5), cgroup v2, sync_file_range(2).
"""

import ctypes
import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

_STATE, _FLAGS, _STARTED = 0, 6, 19
"""Positions in ``/proc/PID/stat``, counted after the name."""

_PF_EXITING = 0x4
"""In the flags: the process ends, its connections are about to break off."""

_LOW_PRIORITY = 10

_BEGIN_WRITEBACK = 2
"""SYNC_FILE_RANGE_WRITE."""

_IN_MEMORY = {"tmpfs", "ramfs"}
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"} | _IN_MEMORY
_CONTROL_GROUP = Path("/sys/fs/cgroup")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Within the block Python does not look for garbage in cycles.

    With torch and Megatron-Core loaded a look takes 0.1 s, and the objects that a load of 10,000
    arrays makes cause four.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@lru_cache(maxsize=1)
def process_name(pid: int) -> str:
    """Identifies a process of this host among all, of other hosts and times; empty if unknown."""
    try:
        return f"{_namespace()} {pid} {_stat(pid)[_STARTED]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether a process with this ``process_name`` is known to have ended, or to be ending."""
    host, _, rest = name.partition(" ")
    pid, _, started = rest.partition(" ")
    try:
        if not started or host != _namespace():
            return False
        stat = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    is_ending = stat[_STATE] in {"Z", "X"} or bool(int(stat[_FLAGS]) & _PF_EXITING)
    return is_ending or stat[_STARTED] != started


def _namespace() -> str:
    """Identifies this host and its process namespace."""
    return f"{_boot_id()}/{Path('/proc/self/ns/pid').readlink()}"


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def lower_priority(thread_id: int) -> None:
    """Let others go before a thread, 0 for this one; a niced job cannot go back to less than it."""
    with suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, max(nice, _LOW_PRIORITY))


def directory_name(directory: Path) -> str:
    """The same for all processes that see this directory of this machine, and for no others.

    An OSError if it is not there, or the system does not say.
    """
    status = directory.stat()
    return f"{_boot_id()} {status.st_dev} {status.st_ino}"


def page_cache_of(directory: Path) -> tuple[str, bool] | None:
    """The page cache that a directory on a local file system is read through; None elsewhere.

    Processes of one host share it if names are equal. True: it is the storage itself, in memory.
    None too where the system does not say: a directory that is missing is for its reader to report.
    """
    with suppress(OSError):
        name, device = directory_name(directory), directory.stat().st_dev
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
        for line in mounts.splitlines():
            fields, _, source = line.partition(" - ")
            kind = source.split()[0]
            if fields.split()[2] == f"{os.major(device)}:{os.minor(device)}" and kind in _LOCAL:
                return name, kind in _IN_MEMORY
    return None


def available_nbytes() -> int:
    """Memory that this process could still get, pages of the cache that can be dropped included.

    The limit of its control group counts; 0 where the system does not say.
    """
    nbytes = 0
    with suppress(OSError, ValueError):  # no control group of version 2, or no limit: "max"
        nbytes = 1024 * _number(Path("/proc/meminfo"), "MemAvailable:")
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        nbytes = min(nbytes, limit - _number(_CONTROL_GROUP / "memory.stat", "anon"))
    return nbytes


def _number(path: Path, name: str) -> int:
    """The number after a name in a file of ``/proc`` or ``/sys``; 0 where it has none."""
    match = re.search(rf"^{name} +(\d+)", path.read_text(encoding="ascii"), re.MULTILINE)
    return int(match[1]) if match else 0


def begin_writeback(handle: int, byte_offset: int, nbytes: int) -> None:
    """Have a range of a file written, and do not wait; nothing where the system cannot."""
    call = getattr(_c_library(), "sync_file_range", None)
    if call is not None:
        call(handle, ctypes.c_int64(byte_offset), ctypes.c_int64(nbytes), _BEGIN_WRITEBACK)


@cache
def _c_library() -> Any:
    return ctypes.CDLL(None, use_errno=True)
