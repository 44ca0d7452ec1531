"""How many files to have under way on a file system, and whether past its page cache."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.storage.disk.direct_io import BounceBuffers


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
    is_direct: bool
    is_flushed_whole: bool

    def bounce_buffers(self) -> BounceBuffers | None:
        """Buffers for one transfer; None where it goes through the page cache."""
        return BounceBuffers() if self.is_direct else None


_LOCAL_DISK = FileAccess(
    num_read_threads=4,
    num_write_threads=8,
    num_metadata_threads=1,
    is_direct=True,
    is_flushed_whole=True,
)
_MEMORY = FileAccess(
    num_read_threads=1,
    num_write_threads=1,
    num_metadata_threads=1,
    is_direct=False,
    is_flushed_whole=False,
)
_OTHER = FileAccess(
    num_read_threads=8,
    num_write_threads=16,
    num_metadata_threads=8,
    is_direct=False,
    is_flushed_whole=False,
)
"""Network file systems: each file waits for a server, so that more of them hide more of it."""

_BY_TYPE = {
    "ext2": replace(_LOCAL_DISK, is_flushed_whole=False),  # its own driver leaves the disk's cache
    "ext3": _LOCAL_DISK,
    "ext4": _LOCAL_DISK,
    "xfs": _LOCAL_DISK,
    "ramfs": _MEMORY,
    "tmpfs": _MEMORY,
}


def file_access(directory: Path) -> FileAccess:
    """What suits the file system of a directory, or of the nearest one above that exists."""
    while not directory.exists():
        directory = directory.parent
    return _BY_TYPE.get(file_system_type(directory) or "", _OTHER)


def permitted_access(directory: Path, options: Options) -> FileAccess:
    """What suits the file system of a directory, as far as the options permit it."""
    access = file_access(directory)
    return replace(
        access,
        is_direct=access.is_direct and options.direct_io,
        is_flushed_whole=access.is_flushed_whole and options.whole_flush,
    )


def file_system_type(path: Path) -> str | None:
    """The type of the file system that a path is on, ``ext4`` say; None if it cannot be told."""
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
