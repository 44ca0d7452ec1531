"""One process of a supervised job: started, watched, and ended with all that it started.

Also the worker's side: the heartbeat, and what starts the command.
"""

import atexit
import math
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from dist_ckpt_strategies.inprocess.launch import HEARTBEAT_PIPE, HEARTBEAT_S, WORKER, Launch
from dist_ckpt_strategies.inprocess.node_guard import kill_session

_HEARTBEAT_THREAD = "dist-ckpt-heartbeat"
_BEAT = b"."
_FAREWELL = b"!"
"""The last heartbeat: threads end some time before the process does."""

_CHUNK = 1 << 16
_BEATS_PER_TIMEOUT = 4
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable that says where torch's ``@record`` writes what a process has raised."""

_UNKILLABLE_S = 30.0
"""How long the end of a killed process may take, which frees its memory on host and devices."""

_FAREWELL_S = 60.0
"""How long the end of an interpreter may take: it sends no more heartbeats."""

_TIED_EXEC = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(1, signal.SIGKILL, 0, 0, 0):  # PR_SET_PDEATHSIG
    sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the elastic agent has gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Run as ``python -c _TIED_EXEC PARENT COMMAND...``: the command, killed when the parent dies."""


def start_heartbeat(launch: Launch) -> None:
    """Send heartbeats from now on, where an elastic agent reads them. Again: no change.

    The thread runs while the main thread computes or waits, in Python or in C code that releases
    the interpreter's lock. It stops with the process, whether that is stopped or dead.
    """
    if launch.heartbeat_pipe is None:
        return
    if any(thread.name == _HEARTBEAT_THREAD for thread in threading.enumerate()):
        return
    fd, inode = launch.heartbeat_pipe
    if not _is_pipe(fd, inode):
        return
    os.set_blocking(fd, False)
    _beat(fd, _BEAT)  # from here on silence counts, even if the thread never comes to run

    def beat() -> None:
        pause = threading.Event()
        with suppress(BrokenPipeError):  # the elastic agent has gone
            while True:
                _beat(fd, _BEAT)
                pause.wait(launch.heartbeat_s)

    def say_farewell() -> None:
        if _is_pipe(fd, inode):
            with suppress(BrokenPipeError):
                _beat(fd, _FAREWELL)

    atexit.register(say_farewell)
    threading.Thread(target=beat, name=_HEARTBEAT_THREAD, daemon=True).start()


def _is_pipe(fd: int, inode: int) -> bool:
    """False in a process that a worker has started: it inherits variables, but no pipe.

    The number may belong to another file there.
    """
    try:
        found = os.fstat(fd)
    except OSError:
        return False
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == inode


def _beat(fd: int, content: bytes) -> None:
    with suppress(BlockingIOError):  # the agent is slow; enough is in the pipe
        os.write(fd, content)


class OutputLines:
    """Calls ``on_line`` with the lines of one output of a worker, as they come, ends included.

    The worker writes to the file ``theirs``, and ``pump`` reads from ``ours``.
    """

    def __init__(self, on_line: Callable[[bytes], None]) -> None:
        self._on_line = on_line
        self._rest = b""
        self.ours, self.theirs = os.pipe()

    def pump(self) -> bool:
        """Pass on what is there, or comes; False once nothing more can."""
        chunk = os.read(self.ours, _CHUNK)
        lines = (self._rest + chunk).splitlines(keepends=True)
        is_cut = bool(lines) and not lines[-1].endswith((b"\n", b"\r")) and len(lines[-1]) < _CHUNK
        self._rest = lines.pop() if chunk and is_cut else b""
        for line in lines:
            self._on_line(line if line.endswith((b"\n", b"\r")) else line + b"\n")
        return bool(chunk)

    def close(self) -> None:
        """Pass on all that is there, a line without an end too, and listen no more."""
        try:
            while select.select([self.ours], [], [], 0)[0] and self.pump():
                continue
            if self._rest:
                self._on_line(self._rest + b"\n")
        finally:
            os.close(self.ours)


class WorkerProcess:
    """A worker from its start to its end.

    The environment is complete, but for the heartbeat. A worker without one for
    ``heartbeat_timeout_s`` seconds counts as hung; 0 disables the check. ``on_line`` is called with
    the worker's rank or "spare", "stdout" or "stderr", and each line that it writes there.

    Attributes:
        name: of this process alone, in the whole job.
        rank: None while it waits as a spare.
        is_hung: whether it was killed because its heartbeats had ended.
        error_file: where it notes what it has raised.
        pid: of its process.
        pidfd: can be read once the process has ended.
        readers: by file, what reads heartbeats, or passes on output, that has come; it returns
            False once no more can.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        heartbeat_timeout_s: float,
        on_line: Callable[[str, str, bytes], None],
    ) -> None:
        self.name = name
        self.rank: int | None = None
        self.error_file = environment[ERROR_FILE]
        self._timeout_s = heartbeat_timeout_s
        self._last_beat: float | None = None
        self._killed_at = math.inf
        self.is_hung = False
        self._beats, theirs = os.pipe()
        self._outputs = [OutputLines(partial(self._pass_on, s)) for s in ("stdout", "stderr")]
        self._on_line = on_line
        own = {
            WORKER: name,
            HEARTBEAT_PIPE: f"{theirs}:{os.fstat(theirs).st_ino}" if heartbeat_timeout_s else "",
            HEARTBEAT_S: str(min(1.0, (heartbeat_timeout_s or 1) / _BEATS_PER_TIMEOUT)),
        }
        out, err = (output.theirs for output in self._outputs)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                [sys.executable, "-I", "-S", "-c", _TIED_EXEC, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**environment, **own},
                pass_fds=(theirs,),
                start_new_session=True,
            )
        finally:
            for fd in (theirs, out, err):
                os.close(fd)
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.readers = {self._beats: self._hear, **{o.ours: o.pump for o in self._outputs}}

    def _pass_on(self, stream: str, line: bytes) -> None:
        self._on_line("spare" if self.rank is None else str(self.rank), stream, line)

    def _hear(self) -> bool:
        beats = os.read(self._beats, _CHUNK)
        if not beats:
            return False
        if _FAREWELL in beats:
            self._timeout_s = max(_FAREWELL_S, self._timeout_s)
        self._last_beat = time.monotonic()
        return True

    def hear_waiting(self) -> bool:
        """Whether heartbeats had come that this process was too slow to take note of."""
        return bool(select.select([self._beats], [], [], 0)[0]) and self._hear()

    def excuse(self) -> None:
        """Count from now on: it was the agent that has not listened."""
        if self._last_beat is not None:
            self._last_beat = time.monotonic()

    def seconds_left(self) -> float:
        """Until its silence is a hang; infinite before its first heartbeat."""
        if self._last_beat is None or not self._timeout_s or self.is_hung:
            return float("inf")
        return self._last_beat + self._timeout_s - time.monotonic()

    def signal(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        self._killed_at = min(self._killed_at, time.monotonic())
        kill_session(self.pid)

    def reap_s(self) -> float:
        """How much longer the kernel may take to end it; it waits if a device is stuck."""
        return _UNKILLABLE_S - max(0.0, time.monotonic() - self._killed_at)

    def end(self) -> int:
        """The exit code of a process that is dying or dead; nothing but a stuck one is left."""
        kill_session(self.pid)  # before the wait, after which the number may be another's
        code = -signal.SIGKILL
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(self.reap_s())
        with ExitStack() as closing:  # a listener may raise
            closing.callback(os.close, self._beats)
            closing.callback(os.close, self.pidfd)
            for output in reversed(self._outputs):
                closing.callback(output.close)
        return code
