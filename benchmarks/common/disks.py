"""Put files, page cache and memory into the same state before every sample.

Four things that have nothing to do with a candidate decide its time if they are left to chance:

- Dirty pages of the sample before are still being written: every sample flushes its own.
- The page cache holds some files and not others: files are read or dropped on purpose.
- A virtual machine hands free memory back to its host after a second or two, and getting it again
  is up to ten times slower than using it: memory is touched and freed just before, in large pages
  and in small ones, which the system takes from different places.
- ext4 without a journal does not reuse inodes for a minute or more after their deletion, and
  steps over them one by one: a save that follows the removal of a thousand files needs a
  millisecond to make a directory, instead of 20 microseconds. Old files are emptied at once, and
  removed at the end; and the file system is told to look for inodes away from where others, such
  as the last benchmark, have removed theirs.

Source: ext4(5) and chattr(1), the attribute T; ``recently_deleted`` in the kernel's fs/ext4.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from dist_ckpt_strategies.cli import bench

_BLOCK = 4 << 20
_SPARE_NBYTES = 64 << 20
_LARGE_PAGE_NBYTES = 2 << 20

_GET_ATTRIBUTES = 0x80086601
_SET_ATTRIBUTES = 0x40086602
_SPREAD = 0x20000
"""The attribute T: each directory made in this one goes to a part of the disk of its own."""


@contextmanager
def workspace(parent: Path | None) -> Iterator[Path]:
    """A new directory under ``parent``, or the temporary directory; removed on leaving."""
    directory = Path(parent or tempfile.gettempdir()) / f"dist-ckpt-bench-{uuid4().hex}"
    try:
        directory.mkdir()  # a signal that comes now finds it to be removed
        _spread(directory)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _spread(directory: Path) -> None:
    """Have directories made in this one placed apart, where the file system knows how."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        found = fcntl.ioctl(handle, _GET_ATTRIBUTES, bytes(8))
        attributes = struct.unpack("l", found)[0] | _SPREAD
        fcntl.ioctl(handle, _SET_ATTRIBUTES, struct.pack("l", attributes))
    except OSError as error:
        if error.errno not in {errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM}:
            raise
    finally:
        os.close(handle)


def retire(directory: Path, attic: Path) -> None:
    """Empty the files of ``directory`` and move it into ``attic``; see the module for why."""
    for path in files_below(directory):
        os.truncate(path, 0)
    attic.mkdir(exist_ok=True)
    directory.rename(attic / str(sum(1 for _ in attic.iterdir())))


def fresh(directory: Path, name: str) -> Path:
    """An empty directory of that name; what was there before is retired."""
    target = directory / name
    if target.exists():
        retire(target, directory / "attic")
    target.mkdir()
    return target


def touch_memory(nbytes: int) -> None:
    """Have ``nbytes`` and some more of free memory at hand; see the module for why."""
    size, flags = nbytes + _SPARE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    with mmap.mmap(-1, size, flags=flags) as large:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                large.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, size, _LARGE_PAGE_NBYTES):
            large[start] = 0
    mmap.mmap(-1, size, flags=flags | getattr(mmap, "MAP_POPULATE", 0)).close()


def drop_cache(directory: Path) -> None:
    """Have the page cache forget the files, which must have been flushed; inodes stay known."""
    bench.drop_cache(files_below(directory))


def fill_cache(directory: Path) -> None:
    """Have the page cache hold the files."""
    for path in files_below(directory):
        with path.open("rb", buffering=0) as file:
            while file.read(_BLOCK):
                pass


def flush_share(directory: Path, number: int, num_shares: int) -> None:
    """Flush every ``num_shares``-th file and directory, so that all shares together flush all."""
    paths = sorted(path for path in directory.rglob("*") if not path.is_symlink())
    for path in [directory, *paths][number::num_shares]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def files_below(directory: Path) -> list[Path]:
    """All regular files, sorted."""
    found = directory.rglob("*")
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``: ``ext4`` or ``tmpfs``, for example."""
    resolved = str(path.resolve())
    best, found = "", "unknown"
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split(" ")
        inside = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, found = mount, kind
    return found


def is_in_memory(path: Path) -> bool:
    """Whether a file system in memory holds ``path``: all its loads are warm."""
    return file_system(path) in {"tmpfs", "ramfs"}
