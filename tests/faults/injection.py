"""What a rank does to itself: it fails, stops or dies at its n-th call, or after some time."""

import builtins
import errno
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import dist_ckpt_strategies
from tests.support.system_calls import CHANGES, before_calls

PACKAGE = str(Path(dist_ckpt_strategies.__file__).parent)

INJECTED = "injected"  # what the error of a failing call says
_STORAGE_CALLS = (
    *("open", "write", "pwrite", "preadv", "fsync", "mkdir", "listdir", "scandir"),
    *CHANGES,
)
_OF_COLLECTIVES = tuple(
    f"comm/{name}.py"
    for name in ("base", "process_group", "torch_communicator", "progress", "abort")
)
"""A rank that fails in there cannot tell the others any more."""


@dataclass(frozen=True, slots=True)
class Trap:
    """What is to happen to a rank, and when."""

    number: int | None  # of the signal, which comes at the end at the latest; None: calls fail
    call: int = 0  # calls before it: of ``target``, or of storage below the root
    delay_s: float = 0.0  # if not 0, in place of ``call``: seconds from the begin of the order
    # a name in TARGETS, of which the package's own calls fail; empty: storage calls.
    target: str = ""
    for_ever: bool = False  # whether all later calls of ``target`` fail too


@dataclass
class Calls:
    """Calls so far, and how many of them have failed (or struck in another way)."""

    number: int
    fails_for_ever: bool = False
    seen: int = 0
    failed: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def is_to_fail(self) -> bool:
        with self.lock:
            self.seen += 1
            is_it = self.seen == self.number or (self.fails_for_ever and self.seen > self.number)
            self.failed += is_it
            return is_it


@contextmanager
def armed(trap: Trap | None, root: Path) -> Iterator[Calls]:
    """Within the block the trap is set; storage calls are those to files below ``root``."""
    if trap is None:
        yield Calls(0)
        return
    if trap.target:
        target = TARGETS[trap.target]
        with failing_call(target, trap.call + 1, for_ever=trap.for_ever) as calls:
            yield calls
        return
    calls = Calls(trap.call + 1)
    strike = partial(_strike, trap.number, calls)

    def count(_: str, path: str) -> None:
        if path.startswith(str(root)) and calls.is_to_fail():
            strike(path)

    timer = threading.Timer(trap.delay_s, strike)
    timer.daemon = True
    if trap.delay_s:
        timer.start()
    try:
        with before_calls(count, () if trap.delay_s else _STORAGE_CALLS):
            yield calls
    finally:
        timer.cancel()
    if trap.number is not None and not calls.failed:
        strike()


def _strike(number: int | None, calls: Calls, path: str = "") -> None:
    calls.failed = 1
    if number is None:
        raise OSError(errno.EIO, INJECTED, path)
    os.kill(os.getpid(), number)


Target = tuple[Any, str, Exception]  # a function of a module or class, and how it fails
_NO_MEMORY = MemoryError(INJECTED)
_NO_FILE = OSError(errno.EIO, INJECTED)
_NO_THREAD = RuntimeError(f"can't start new thread: {INJECTED}")
_OF_OS = (
    *("open", "preadv", "pread", "pwrite", "write", "fsync"),
    *("stat", "makedirs", "replace", "unlink"),
)
TARGETS: dict[str, Target] = {
    **{f"np.{name}": (np, name, _NO_MEMORY) for name in ("empty", "zeros", "frombuffer")},
    **{f"torch.{name}": (torch, name, _NO_MEMORY) for name in ("empty", "from_numpy")},
    "mmap": (mmap, "mmap", _NO_MEMORY),
    "open": (builtins, "open", _NO_FILE),
    **{f"os.{name}": (os, name, _NO_FILE) for name in _OF_OS},
    "Thread.start": (threading.Thread, "start", _NO_THREAD),
}


@contextmanager
def failing_call(target: Target, number: int, *, for_ever: bool = False) -> Iterator[Calls]:
    """Within the block the n-th call that the package makes fails; with ``for_ever`` all later too.

    Calls within the communication between ranks are passed over: those of torch's, and those in
    which collectives run.
    """
    calls = Calls(number, for_ever)
    owner, name, error = target
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_of_package(sys._getframe(1)) and calls.is_to_fail():
            raise type(error)(*error.args)
        return real(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


def _is_of_package(frame: FrameType | None) -> bool:
    """Whether the nearest file that is not Python's own is the package's, and of no collective."""
    depth = 0
    while frame is not None and depth < 12:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE):
            # A rank-local step between collectives: its failure is raised on all ranks.
            is_step = frame.f_code.co_qualname.startswith("run_and_gather_bytes.")
            return is_step or not name.endswith(_OF_COLLECTIVES)
        if "/torch/" in name or "/tests/" in name:
            return False
        frame, depth = frame.f_back, depth + 1
    return False
