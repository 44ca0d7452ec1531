"""Memory that two processes have in common."""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress

from dist_ckpt_strategies.errors import StorageError

_NAME = "dist_ckpt-snapshot"


def is_supported() -> bool:
    """Whether this system has memory of that kind."""
    return hasattr(os, "memfd_create")


class SharedBytes:
    """Memory without a name: who is sent its file descriptor can map it too.

    All of it is there on return, so that nobody runs out of it in the middle of a copy.

    Args:
        nbytes: how much.

    Attributes:
        handle: the file descriptor, closed when this object is gone.
        memory: the mapping; its views keep it.

    Raises:
        StorageError: there is not so much.
    """

    def __init__(self, nbytes: int) -> None:
        self.handle = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.handle)
        try:
            os.posix_fallocate(self.handle, 0, max(1, nbytes))
        except OSError as error:
            raise StorageError(
                f"no memory to copy {nbytes} bytes to for an asynchronous save: {error.strerror}"
            ) from error
        self.memory = mmap.mmap(self.handle, max(1, nbytes), flags=_populated(mmap.MAP_SHARED))


def mapped(handle: int) -> memoryview:
    """All the memory behind a file descriptor, to read; the descriptor may be closed then."""
    return memoryview(mmap.mmap(handle, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))


def _populated(flags: int) -> int:
    """With the pages in place: one by one, at their first use, they take several times as long."""
    with suppress(AttributeError):
        return flags | mmap.MAP_POPULATE
    return flags
