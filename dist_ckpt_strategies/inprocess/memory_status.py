"""How much memory this process uses from one attempt to the next."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_TOLERANCE = 1.2
_SLACK_BYTES = 256 << 20
_LEFTOVER_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Memory in use, in bytes.

    Attributes:
        resident: of the host.
        cuda: allocated by torch on the current device; 0 where CUDA has not been used.
    """

    resident: int
    cuda: int

    @classmethod
    def take(cls) -> MemoryStatus:
        """Of now."""
        return cls(_resident_bytes(), _cuda_bytes())

    def has_outgrown(self, first: MemoryStatus) -> bool:
        """Whether it is well above ``first``: more than what allocators vary by."""
        pairs = ((self.resident, first.resident), (self.cuda, first.cuda))
        return any(now > _TOLERANCE * then + _SLACK_BYTES for now, then in pairs)

    def has_leftovers(self, before: MemoryStatus) -> bool:
        """Whether an attempt has left so much behind that collecting its cycles is worth it."""
        grown = max(self.resident - before.resident, self.cuda - before.cuda)
        return grown > _LEFTOVER_BYTES

    def __str__(self) -> str:
        """In MiB."""
        return f"{self.resident >> 20} MiB resident, {self.cuda >> 20} MiB of CUDA memory"


class MemoryLog:
    """Logs memory at each restart, and warns where it grows."""

    def __init__(self) -> None:
        self._first: MemoryStatus | None = None

    def note(self, attempt: int) -> MemoryStatus:
        """Log what is used after ``attempt``; later notes are held against the first."""
        now = MemoryStatus.take()
        if self._first is None:
            self._first = now
        if now.has_outgrown(self._first):
            logger.warning(
                "memory grows: %s after attempt %d, %s at first", now, attempt, self._first
            )
        else:
            logger.info("after attempt %d: %s", attempt, now)
        return now


def give_back_free_memory() -> None:
    """Let the C library return what it keeps of freed memory to the system, where it can.

    Each attempt allocates its model anew, and from other threads. Between what lives longer, glibc
    keeps the holes of all of them: without this a process grew by some megabytes with each restart.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _cuda_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.memory_allocated())
