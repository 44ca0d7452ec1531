"""Names of processes, unique among hosts and times, and whether such a process has ended."""

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_STATE, _FLAGS, _STARTED = 0, 6, 19
"""Where these stand in ``/proc/PID/stat``, counted after the name; see proc(5)."""

_LOW_PRIORITY = 10

_PF_EXITING = 0x4
"""In the flags of ``/proc/PID/stat``: the process ends, its connections are about to break off."""


@lru_cache(maxsize=1)
def _host_name() -> str:
    """Identifies this host and its process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


@lru_cache(maxsize=1)
def process_name(pid: int) -> str:
    """Identifies a process of this host among all, of other hosts and times; empty if unknown."""
    try:
        return f"{_host_name()} {pid} {_stat(pid)[_STARTED]}"
    except OSError:
        return ""


def has_ended(name: str) -> bool:
    """Whether a process with this ``process_name`` is known to have ended, or to be ending."""
    host, _, rest = name.partition(" ")
    pid, _, started = rest.partition(" ")
    try:
        if not started or host != _host_name():
            return False
        stat = _stat(int(pid))
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    is_ending = stat[_STATE] in {"Z", "X"} or bool(int(stat[_FLAGS]) & _PF_EXITING)
    return is_ending or stat[_STARTED] != started


def lower_priority(thread_id: int) -> None:
    """Let others go before a thread, 0 for this one; a niced job cannot go back to less than it."""
    with suppress(OSError):
        nice = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, max(nice, _LOW_PRIORITY))


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
