"""Processes of this host: what tells them apart, and whether one has ended."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

_PF_EXITING = 0x4
"""In the flags of ``/proc/PID/stat``: the process ends, its connections are about to break off."""


def host_name() -> str | None:
    """What tells this host, and what of it this process can see, from others; None if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        processes = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return None
    return f"{boot}/{processes}"


@lru_cache(maxsize=1)
def process_name(pid: int) -> str:
    """What tells a process of this host from all others, of other hosts and other times too."""
    try:
        return f"{host_name()} {pid} {_stat(pid)[_STARTED]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether a process that gave itself this name is known to have ended, or to be ending."""
    host, _, rest = name.partition(" ")
    pid, _, started = rest.partition(" ")
    if not started or host != host_name():
        return False
    try:
        stat = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return not _exists(int(pid))  # it may be hidden, as another user's
    except OSError:
        return False
    is_ending = stat[_STATE] in {"Z", "X"} or int(stat[_FLAGS]) & _PF_EXITING
    return stat[_STARTED] != started or bool(is_ending)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    else:
        return True


_STATE, _FLAGS, _STARTED = 0, 6, 19
"""Where these stand in ``/proc/PID/stat``, counted behind the name; see proc(5)."""


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
