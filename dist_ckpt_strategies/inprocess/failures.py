"""Causes of workers' deaths, in the events, files and reports of torchelastic."""

import json
import signal
import socket
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.events import record  # noqa: TID251 - the launcher
from torch.distributed.elastic.events.api import (  # noqa: TID251 - as above
    Event,
    EventMetadataValue,
    EventSource,
)
from torch.distributed.elastic.multiprocessing.errors import (  # noqa: TID251 - the launcher
    ChildFailedError,
    ErrorHandler,
    ProcessFailure,
)

from dist_ckpt_strategies.inprocess.job import Job
from dist_ckpt_strategies.inprocess.worker_process import WorkerProcess

_MAX_NAMED = 8


class Failures:
    """The deaths of this node's workers.

    ``error_file`` is where torchrun's own caller looks for the first error; "" if nobody does.
    ``place`` is the node's place in the job, for the events.
    """

    def __init__(self, job: Job, error_file: str) -> None:
        self._job = job
        self._error_file = error_file
        self._num_by_rank: Counter[int] = Counter()
        self._last_round, self._last = -1, dict[int, ProcessFailure]()
        self.place = 0

    def add(self, worker: WorkerProcess, rank: int, code: int, restart_round: int | None) -> None:
        """Count a rank's death, and record torch's event of it.

        ``restart_round`` is the one that the worker had joined, if any.
        """
        failure = failure_of(worker, code, rank % self._job.num_ranks)
        self._record("FAILED", rank, failure)
        self._num_by_rank[rank] += 1
        if restart_round is not None and restart_round > self._last_round:
            self._last_round, self._last = restart_round, {}  # the job has survived those before
        self._last[rank] = failure

    def reason(self, worker: WorkerProcess, code: int) -> str:
        """Why a worker is gone, in words."""
        if worker.is_hung:
            return f"no heartbeat for {self._job.heartbeat_timeout_s:g} s"
        message = failure_of(worker, code).error_file_data["message"]
        details = f": {message['message']}" if isinstance(message, dict) else ""
        if code >= 0:
            return f"exit code {code}{details}"
        try:
            return f"killed by {signal.Signals(-code).name}{details}"
        except ValueError:
            return f"killed by signal {-code}{details}"

    def record_end(self, rank: int | None, *, is_good: bool) -> None:
        """Record torch's event of the end of a rank, or of this agent."""
        self._record("SUCCEEDED" if is_good else "FAILED", rank, None)

    def counts(self) -> str:
        """How often ranks have died, the worst first; "" if none has."""
        worst = self._num_by_rank.most_common(_MAX_NAMED)
        return ", ".join(f"rank {rank} {num}x" for rank, num in worst)

    def report(self, on_line: Callable[[str], None]) -> None:
        """Report the failures of the last restart round, with tracebacks, as torchrun does."""
        if not self._last:
            return
        error = ChildFailedError(" ".join(self._job.command), dict(sorted(self._last.items())))
        for line in str(error).strip().splitlines():
            on_line(line)
        _, first = error.get_first_failure()
        if self._error_file and Path(first.error_file).exists():
            ErrorHandler().dump_error_file(first.error_file, first.exitcode)

    def _record(self, state: str, rank: int | None, failure: ProcessFailure | None) -> None:
        metadata: dict[str, EventMetadataValue] = {
            "run_id": self._job.run_id,
            "global_rank": rank,
            "group_rank": self.place,
            "hostname": socket.gethostname(),
            "state": state,
            "raw_error": None if failure is None else json.dumps(failure.error_file_data),
            "agent_restarts": self._num_by_rank.total(),
        }
        source = EventSource.AGENT if rank is None else EventSource.WORKER
        name = f"torchelastic.worker.status.{state}"
        record(Event(name, source, metadata=metadata), self._job.event_log_handler)


def failure_of(worker: WorkerProcess, code: int, local_rank: int = -1) -> ProcessFailure:
    """A worker's end, with what ``@record`` has written to its error file."""
    try:
        return ProcessFailure(local_rank, worker.pid, code, worker.error_file)
    except (ValueError, KeyError, TypeError):  # it was killed while it wrote the file
        return ProcessFailure(local_rank, worker.pid, code, "")
