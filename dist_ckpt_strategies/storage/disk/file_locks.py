"""Locks that tell a file that is being written from one that a killed process has left.

The system lets go of a lock when the last handle of the file that was opened is closed, or its
process ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl

_UNKNOWN = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
"""What file systems answer that have no locks; files of theirs count as not locked."""


def lock(handle: int) -> None:
    """Lock an open file for as long as it is open, once nobody else has it locked.

    Raises:
        OSError: the system refuses.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise


def try_lock(handle: int) -> bool:
    """Lock an open file unless somebody has it locked; returns whether nobody had.

    Raises:
        OSError: the system refuses.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    return True
