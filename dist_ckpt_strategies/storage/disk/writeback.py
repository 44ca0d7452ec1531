"""Have the disk begin with a file before it is complete.

The kernel keeps what is written for seconds, and a flush at the end finds all of it still to be
written. Told to begin, it writes while the rest of the file is still on its way.

Source: sync_file_range(2), which only begins here: errors are left for the flush to report.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

_BEGIN = 2
"""SYNC_FILE_RANGE_WRITE."""


def begin_writeback(handle: int, byte_offset: int = 0, nbytes: int = 0) -> None:
    """Have a range of a file written, and do not wait; nothing where the system cannot.

    Args:
        handle: of the file.
        byte_offset: first byte of the range.
        nbytes: its size; 0 for all up to the file's end.
    """
    call = _system_call()
    if call is not None:
        call(handle, ctypes.c_int64(byte_offset), ctypes.c_int64(nbytes), _BEGIN)


@cache
def _system_call() -> Any:
    if platform.system() != "Linux":
        return None
    return getattr(ctypes.CDLL(None), "sync_file_range", None)
