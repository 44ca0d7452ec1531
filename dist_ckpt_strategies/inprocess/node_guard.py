"""Kills a node's workers when the agent is gone, or another node may be given its place in the job.

The agent, ``dist-ckpt run``, may be stopped itself, so this is a process of its own, which imports
nothing of the package. It reads lines: ``renewed SECONDS``, when a renewal of the place that has
succeeded was begun, by the monotonic clock; ``+PID`` and ``-PID`` of a worker that has been started
or has ended; and ``fence``. It kills the sessions of all workers when no renewal has succeeded that
was begun within the limit, at ``fence``, and when the agent is gone. Before it does, it writes
a byte to its standard output, and closes it.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_CHUNK = 1 << 16
_KILL_S = 5.0
_PAUSE_S = 0.01
_NOT_FOR_US = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""SLURM sends a signal to all processes of a step. What becomes of the job the agent decides."""


class NodeGuard:
    """The agent's side: starts the guard, and tells it what to know.

    ``fence_s`` is the limit; infinite where no other node could take the place.
    """

    def __init__(self, fence_s: float) -> None:
        lines, self._lines = os.pipe()
        self.fired, fired = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603 - this file
            [sys.executable, "-I", "-S", __file__, str(fence_s)],
            stdin=lines,
            stdout=fired,
            start_new_session=True,
        )
        os.close(lines)
        os.close(fired)
        os.set_blocking(self._lines, False)

    def tell(self, line: str) -> None:
        """Send one of the lines; an OSError if the guard is gone, or does not read."""
        os.write(self._lines, f"{line}\n".encode())

    def has_fired(self) -> bool:
        """Whether it kills the workers, or is dead; ``fired`` can be read then."""
        return bool(select.select([self.fired], [], [], 0)[0])

    def was_killed(self) -> bool:
        """Whether it is dead without having killed the workers; for once, when it has fired."""
        return not os.read(self.fired, 1)

    def close(self) -> None:
        """End the guard; it kills what is left of the workers."""
        os.close(self._lines)
        self._process.wait()
        os.close(self.fired)


def kill_session(leader: int) -> bool:
    """Kill all processes of a session; whether any was found.

    Those too that have a process group of their own by now.
    """
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    is_found = False
    for place in Path("/proc").iterdir():
        if not place.name.isdecimal():
            continue
        with suppress(OSError):  # it has ended since it was listed
            # After the name, which may hold anything: state, parent, group, session.
            fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                is_found = True
                os.kill(int(place.name), signal.SIGKILL)
    return is_found


def _workers_to_kill(fence_s: float) -> set[int]:
    """Read until the workers have to be killed; the leaders of their sessions."""
    workers: set[int] = set()
    deadline, rest = float("inf"), b""
    while True:
        left_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        if not select.select([0], [], [], left_s)[0]:
            return workers
        chunk = os.read(0, _CHUNK)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            word, _, seconds = line.decode().partition(" ")
            if word == "renewed":
                deadline = float(seconds) + fence_s
            elif word.startswith("+"):
                workers.add(int(word))
            elif word.startswith("-"):
                workers.discard(-int(word))
        if not chunk or b"fence" in lines:
            return workers


def _kill(workers: set[int]) -> None:
    """Again while any is left: one of them may have started another process meanwhile."""
    deadline = time.monotonic() + _KILL_S
    while sum(map(kill_session, workers)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    for number in _NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    workers = _workers_to_kill(float(sys.argv[1]))
    with suppress(OSError):  # the agent is gone
        os.write(1, b"!")
    os.close(1)
    _kill(workers)
