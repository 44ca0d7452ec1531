"""``python tied_exec.py PARENT COMMAND...``: become the command, and die with the parent.

A file of its own, without any import of this package: each worker starts through it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGKILL when the parent dies, and turn into the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("the supervisor has gone")
    os.execv(command[0], command)  # noqa: S606 - the command of whoever started the supervisor


if __name__ == "__main__":
    main()
