"""File data: slice by slice, or past the page cache through buffers that the disk reads at once.

Measured on an ext4 disk, two ranks, 290 files: writing and flushing this way takes 0.6-0.85 times
as long as one buffered stream, and reading files that are not cached 1.0 times, where buffered
reads of many files take 1.2-2.5 times. What makes it fast is the huge page behind the buffer; with
ordinary pages it is slower than buffered writing.

Source: open(2), O_DIRECT; the transparent huge page advice of madvise(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.storage.time_limit import MAX_SLICE_NBYTES, raise_if_cancelled

Bytes = npt.NDArray[np.uint8]

BLOCK_NBYTES = 4096
"""Offsets, sizes and addresses are multiples of this; no disk has larger logical blocks."""

MIN_DIRECT_NBYTES = 64 << 10
"""Smaller files gain nothing."""

_HUGE_PAGE_NBYTES = 2 << 20
BUFFER_NBYTES = 6 << 20
"""Of a bounce buffer; some whole huge pages."""

_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}


class BounceBuffers:
    """Buffers for threads at work, made as they are first needed.

    Takes one for each thread that has work at the same time, freed with the object.
    """

    def __init__(self) -> None:
        self._idle: deque[Bytes] = deque()

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
            buffer = _huge_page_buffer(BUFFER_NBYTES)
        try:
            yield buffer
        finally:
            self._idle.append(buffer)


def _huge_page_buffer(nbytes: int) -> Bytes:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, nbytes + _HUGE_PAGE_NBYTES, flags=flags)
    with suppress(OSError, AttributeError):  # a kernel, or a system, without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE_NBYTES
    buffer = whole[start : start + nbytes]
    buffer.fill(0)
    return buffer


def start_direct(handle: int) -> bool:
    """Switch an open file to direct transfers; False where its file system has none."""
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return False
        raise
    return True


def stop_direct(handle: int) -> None:
    """Switch an open file back to buffered transfers."""
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~os.O_DIRECT)


def read_direct(handle: int, byte_offset: int, target: Bytes, buffer: Bytes) -> int:
    """Fill ``target`` from a position of the file; returns the bytes that there were.

    Args:
        handle: an open file, switched to direct transfers.
        byte_offset: of the first byte.
        target: what to fill.
        buffer: aligned, of three blocks or more.
    """
    done, most = 0, buffer.size - 2 * BLOCK_NBYTES
    while done < target.size:
        some = read_aligned(handle, byte_offset + done, min(most, target.size - done), buffer)
        if not some.size:
            break
        target[done : done + some.size] = some
        done += some.size
    return done


def read_aligned(handle: int, byte_offset: int, nbytes: int, buffer: Bytes) -> Bytes:
    """Bytes of the file, in a part of the buffer; fewer where the file ends.

    Args:
        handle: an open file, switched to direct transfers.
        byte_offset: of the first byte.
        nbytes: how many.
        buffer: aligned, and larger than ``nbytes`` by two blocks.
    """
    skipped = byte_offset % BLOCK_NBYTES
    wanted = -(-(skipped + nbytes) // BLOCK_NBYTES) * BLOCK_NBYTES
    done = 0
    while done < skipped + nbytes:
        got = os.preadv(handle, [buffer[done:wanted].data], byte_offset - skipped + done)
        raise_if_cancelled()
        done += got
        if got == 0 or got % BLOCK_NBYTES:
            break
    return buffer[skipped : min(done, skipped + nbytes)]


def pread_into(handle: int, byte_offset: int, target: Bytes) -> int:
    """Fill ``target`` from a position of the file; returns the bytes that there were."""
    done = 0
    while done < target.size:
        raise_if_cancelled()
        some = target[done : done + MAX_SLICE_NBYTES]
        got = os.preadv(handle, [some.data], byte_offset + done)
        if got == 0:
            break
        done += got
    return done


def write_buffered(handle: int, content: Bytes) -> None:
    """Write every byte behind what was written last, a slice at a time."""
    done = 0
    while done < content.size:
        raise_if_cancelled()
        done += os.write(handle, content[done : done + MAX_SLICE_NBYTES].data)


_BEGIN = 2
"""SYNC_FILE_RANGE_WRITE."""


def begin_writeback(handle: int, byte_offset: int = 0, nbytes: int = 0) -> None:
    """Have a range of a file written, and do not wait; nothing where the system cannot.

    Args:
        handle: of the file.
        byte_offset: first byte of the range.
        nbytes: its size; 0 for all up to the file's end.
    """
    call = getattr(_c_library(), "sync_file_range", None)
    if call is not None:
        call(handle, ctypes.c_int64(byte_offset), ctypes.c_int64(nbytes), _BEGIN)


@cache
def _c_library() -> Any:
    return ctypes.CDLL(None) if platform.system() == "Linux" else None
