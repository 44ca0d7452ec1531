"""The workers of a node: started, heard and ended; and the guard that kills them in time."""

import math
import selectors
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from dist_ckpt_strategies.errors import PeerLostError
from dist_ckpt_strategies.inprocess.job import Job
from dist_ckpt_strategies.inprocess.node_guard import NodeGuard
from dist_ckpt_strategies.inprocess.rendezvous import RankInfo, environment_of
from dist_ckpt_strategies.inprocess.worker_process import ERROR_FILE, WorkerProcess

_AWAY_S = 0.5
_GUARD_GONE = "the guard of this node's workers is gone"


class Workers:
    """The worker processes of a node that run, in the order of their start.

    Args:
        job: what they run.
        node: this node among others; "" if the job has no other.
        environment: variables of all of them.
        on_line: called with a worker's rank or "spare", "stdout" or "stderr", and each line that
            the worker writes there.
        inbox: file descriptor that ends a wait when it can be read.
    """

    def __init__(
        self,
        job: Job,
        node: str,
        environment: Mapping[str, str],
        on_line: Callable[[str, str, bytes], None],
        inbox: int,
    ) -> None:
        self._job, self._node = job, node
        self._environment, self._on_line = environment, on_line
        self._running: dict[str, WorkerProcess] = {}
        self._num_started = 0
        self._error_files = TemporaryDirectory(prefix="dist-ckpt-errors-")
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox, selectors.EVENT_READ)
        self._guard: NodeGuard | None = None
        if job.nodes is None or not job.nodes.is_store_only:
            self._guard = NodeGuard(math.inf if job.nodes is None else job.nodes.fence_s)
            self._selector.register(self._guard.fired, selectors.EVENT_READ)

    def __len__(self) -> int:
        """How many run, or have not been removed."""
        return len(self._running)

    def __iter__(self) -> Iterator[WorkerProcess]:
        """Workers that run, or have not been removed."""
        return iter(list(self._running.values()))

    def start(self, place: RankInfo | None) -> WorkerProcess:
        """Start a worker: for a rank, or as a spare."""
        number, self._num_started = self._num_started, self._num_started + 1
        environment = {**self._environment, **({} if place is None else environment_of(place))}
        environment[ERROR_FILE] = str(Path(self._error_files.name, f"worker{number}.json"))
        worker = WorkerProcess(
            f"{self._node}/worker{number}" if self._node else f"worker{number}",
            self._job.command,
            environment,
            self._job.heartbeat_timeout_s,
            self._on_line,
        )
        self._running[worker.name] = worker
        self.tell_guard(f"+{worker.pid}")
        for file in (worker.pidfd, *worker.readers):
            self._selector.register(file, selectors.EVENT_READ, worker)
        return worker

    def watch(self, timeout_s: float) -> list[WorkerProcess]:
        """Like ``wait``; also kills workers whose heartbeats have ended."""
        timeout_s = max(0.0, min([timeout_s, *(worker.seconds_left() for worker in self)]))
        began = time.monotonic()
        events = self._selector.select(timeout_s)
        # Where this process was stopped itself, it knows nothing of the silence of others.
        was_away = time.monotonic() - began > timeout_s + _AWAY_S
        ended = self._read(events)
        for worker in self:
            if was_away:
                worker.excuse()
            if worker not in ended and worker.seconds_left() <= 0 and not worker.hear_waiting():
                worker.is_hung = True
                worker.kill()
        return ended

    def wait(self, timeout_s: float) -> list[WorkerProcess]:
        """Wait for an end, output, or news in the inbox; those that have ended.

        Passes on what workers have written. Those that have ended stay until ``remove``.
        """
        return self._read(self._selector.select(timeout_s))

    def remove(self, worker: WorkerProcess) -> int:
        """The exit code of a worker that has ended, or is killed now."""
        del self._running[worker.name]
        for file in (worker.pidfd, *worker.readers):
            if file in self._selector.get_map():
                self._selector.unregister(file)
        code = worker.end()
        if not self.is_fenced:
            self.tell_guard(f"-{worker.pid}")
        return code

    def kill_all(self) -> None:
        """Kill and remove all; a listener that raises keeps none of them alive."""
        with ExitStack() as ending:
            for worker in self:
                worker.kill()
                ending.callback(self.remove, worker)

    def close(self) -> None:
        """Give up what is left: no worker runs any more."""
        if self._guard is not None:
            self._guard.close()
        self._selector.close()
        self._error_files.cleanup()

    # The guard

    @property
    def is_fenced(self) -> bool:
        """Whether the guard kills the workers, or is dead."""
        return self._guard is not None and self._guard.has_fired()

    def why_fenced(self) -> str:
        """Why the guard has fired; for once."""
        if self._job.nodes is None or self._guard is None or self._guard.was_killed():
            return _GUARD_GONE
        return f"this node could not renew its place for {self._job.nodes.fence_s:g} s"

    def tell_guard(self, line: str) -> None:
        """Send the guard one of its lines; a PeerLostError if it is gone. For any thread."""
        try:
            if self._guard is not None:
                self._guard.tell(line)
        except OSError as error:
            raise PeerLostError(None, f"{_GUARD_GONE}: {error}") from error

    def _read(self, events: list[tuple[selectors.SelectorKey, int]]) -> list[WorkerProcess]:
        ended = []
        for key, _ in events:
            worker = key.data
            if worker is None:  # the inbox, or the guard
                continue
            if key.fd == worker.pidfd:
                ended.append(worker)
            elif not worker.readers[key.fd]():
                self._selector.unregister(key.fd)
        return ended
