"""Failures put into a rank: at the n-th call of a function that gets memory, files or threads."""

from __future__ import annotations

import builtins
import errno
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest
import torch

import dist_ckpt_strategies

PACKAGE = str(Path(dist_ckpt_strategies.__file__).parent)

TEXT = "injected"

_OF_MEETINGS = (
    "comm/collective.py",
    "comm/base.py",
    "comm/process_group.py",
    "comm/torch_communicator.py",
)
"""Where ranks meet: who fails in there cannot tell the others any more."""


def no_memory() -> Exception:
    """What Python raises where there is none."""
    return MemoryError(TEXT)


def no_file() -> Exception:
    """What the system says of a disk that is broken."""
    return OSError(errno.EIO, TEXT)


def no_thread() -> Exception:
    """What Python raises where the system starts no more of them."""
    return RuntimeError(f"can't start new thread: {TEXT}")


@dataclass(frozen=True)
class Target:
    """A function of Python, numpy, torch or the system, and how it fails."""

    owner: Any
    name: str
    error: Callable[[], Exception]


TARGETS = {
    "np.empty": Target(np, "empty", no_memory),
    "np.zeros": Target(np, "zeros", no_memory),
    "np.frombuffer": Target(np, "frombuffer", no_memory),
    "torch.empty": Target(torch, "empty", no_memory),
    "torch.from_numpy": Target(torch, "from_numpy", no_memory),
    "mmap": Target(mmap, "mmap", no_memory),
    "open": Target(builtins, "open", no_file),
    "os.open": Target(os, "open", no_file),
    "os.preadv": Target(os, "preadv", no_file),
    "os.pread": Target(os, "pread", no_file),
    "os.pwrite": Target(os, "pwrite", no_file),
    "os.write": Target(os, "write", no_file),
    "os.fsync": Target(os, "fsync", no_file),
    "os.stat": Target(os, "stat", no_file),
    "os.makedirs": Target(os, "makedirs", no_file),
    "os.replace": Target(os, "replace", no_file),
    "os.unlink": Target(os, "unlink", no_file),
    "Thread.start": Target(threading.Thread, "start", no_thread),
}


@dataclass
class Calls:
    """How often a function has been called for the package, and how often it has failed."""

    number: int
    fails_for_ever: bool = False
    seen: int = 0
    failed: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def is_to_fail(self) -> bool:
        """Whether this call is to fail."""
        with self.lock:
            self.seen += 1
            is_it = self.seen == self.number or (self.fails_for_ever and self.seen > self.number)
            self.failed += is_it
            return is_it


@contextmanager
def failing_call(target: Target, number: int, *, for_ever: bool = False) -> Iterator[Calls]:
    """Within the block the n-th call that the package makes fails; with ``for_ever`` all later too.

    Calls within the communication between ranks are passed over: those of torch's, and those in
    which the ranks meet.
    """
    calls = Calls(number, for_ever)
    real = getattr(target.owner, target.name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_of_package(sys._getframe(1)) and calls.is_to_fail():
            raise target.error()
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target.owner, target.name, call)
        yield calls


def _is_of_package(frame: FrameType | None) -> bool:
    """Whether the nearest file that is not Python's own is the package's, and of no meeting."""
    depth = 0
    while frame is not None and depth < 12:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            return _may_fail(frame.f_code) or not name.endswith(_OF_MEETINGS)
        if "/torch/" in name or "/tests/" in name:
            return False
        frame, depth = frame.f_back, depth + 1
    return False


def _may_fail(code: CodeType) -> bool:
    """Rank-local steps between collectives: their failure is raised on all ranks."""
    return code.co_qualname.startswith("run_and_gather_bytes.")
