"""Starts the workers of a job on this node, and replaces those that die."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.config import COORDINATOR
from dist_ckpt_strategies.errors import RestartError, RestartLimitError
from dist_ckpt_strategies.inprocess.coordinator import (
    Fault,
    FaultMode,
    RankInfo,
    environment_of,
)
from dist_ckpt_strategies.inprocess.store_coordinator import RestartState
from dist_ckpt_strategies.inprocess.worker_process import WorkerProcess, reason_of

_HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNAL_CODE = 128
_PATIENCE_S = 1.0
_AWAY_S = 0.5
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """What a supervisor runs.

    Attributes:
        command: program and arguments of every worker.
        num_ranks: of the world.
        num_spares: processes that wait, with everything imported, to take over a rank.
        max_restarts: how often a worker may be replaced, all ranks counted together.
        heartbeat_timeout_s: seconds of silence after which a worker is taken for hung; 0: never.
        grace_s: seconds that workers get to end by themselves after a signal.
    """

    command: tuple[str, ...]
    num_ranks: int
    num_spares: int = 0
    max_restarts: int = 16
    heartbeat_timeout_s: float = 30.0
    grace_s: float = 5.0


class Supervisor:
    """One job of one node. Linux only; ``run`` belongs into the main thread.

    Args:
        job: what to run.
        environment: of the workers, but for what the supervisor sets.
        on_line: called with a worker's rank or "spare", "stdout" or "stderr", and each line that
            the worker writes there.
        on_note: called with a text where something happens to a worker.
    """

    def __init__(
        self,
        job: Job,
        environment: Mapping[str, str],
        on_line: Callable[[str, str, bytes], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._job = job
        self._on_line = on_line
        self._on_note = on_note
        self._host = host_store(_HOST)
        self._environment = _environment(job, environment, self._host.port)
        self._store = JobStore(_HOST, self._host.port)
        self._state = RestartState(self._store)
        self._selector = selectors.DefaultSelector()
        self._workers: dict[str, WorkerProcess] = {}
        self._ranks: dict[str, int] = {}
        self._finished: set[int] = set()
        self._signals: list[int] = []
        self._failures: Counter[int] = Counter()
        self._num_failures = 0
        self._num_started = 0

    def run(self) -> int:
        """Run the job to its end; the exit code: 0, or 128 and the number of a signal.

        No process of the job is left, however this returns or raises.

        Raises:
            RestartLimitError: workers have died too often.
            RestartError: one died after others had finished.
        """
        with _noting(self._signals) as inbox:
            self._selector.register(inbox, selectors.EVENT_READ, lambda: None)  # see the loop
            try:
                for rank in range(self._job.num_ranks):
                    self._assign(self._start(rank), rank)
                for _ in range(self._job.num_spares):
                    self._start(None)
                while len(self._finished) < self._job.num_ranks and not self._signals:
                    self._step()
            finally:
                self._selector.unregister(inbox)
                self._end_all()
        return _SIGNAL_CODE + self._signals[0] if self._signals else 0

    def _step(self) -> None:
        """Wait until something happens, and deal with it."""
        left_s = (worker.seconds_left() for worker in self._workers.values())
        patience_s = max(0.0, min([_PATIENCE_S, *left_s]))
        started = time.monotonic()
        self._deal_with_events(patience_s)
        # Where this process was stopped itself, it knows nothing of the silence of others.
        was_away = time.monotonic() - started > patience_s + _AWAY_S
        for worker in list(self._workers.values()):
            if was_away:
                worker.excuse()
            if worker.seconds_left() <= 0:
                worker.kill_as_hung()

    def _deal_with_events(self, patience_s: float) -> None:
        for key, _ in self._selector.select(patience_s):
            # What one event has closed, others of the same moment may still name.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def _start(self, rank: int | None) -> WorkerProcess:
        name = f"worker{self._num_started}"
        self._num_started += 1
        place = {} if rank is None else environment_of(self._place(rank))
        worker = WorkerProcess(
            name,
            self._job.command,
            {**self._environment, **place},
            self._job.heartbeat_timeout_s,
            lambda stream, line: self._on_line(str(self._ranks.get(name, "spare")), stream, line),
        )
        self._workers[name] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ, lambda: self._lose(worker))
        self._hear_while(worker.beats, worker.hear)
        for output in worker.outputs:
            self._hear_while(output.fileno(), output.pump)
        return worker

    def _hear_while(self, fd: int, react: Callable[[], bool]) -> None:
        """Until ``react`` returns False: nothing more can come."""
        self._selector.register(
            fd, selectors.EVENT_READ, lambda: react() or self._selector.unregister(fd)
        )

    def _lose(self, worker: WorkerProcess) -> None:
        """A worker is gone."""
        code = self._take_away(worker)
        rank = self._ranks.get(worker.name)
        why = reason_of(code)
        if worker.is_hung:
            why = f"no sign of life for {self._job.heartbeat_timeout_s:g} s"
        if rank is None:
            self._lose_spare(code, why)
            return
        epoch = self._state.joined(worker.name)
        if code != 0:
            self._replace(worker, rank, epoch, why)
        elif epoch is not None and not self._state.is_done(epoch):
            self._replace(worker, rank, epoch, f"{why} in the middle of the wrapped block")
        else:
            self._finished.add(rank)

    def _lose_spare(self, code: int, why: str) -> None:
        if code == 0:
            self._on_note("a spare has ended without waiting in wait_rank(); it is no spare")
            return
        self._count_failure(None, why)
        self._on_note(f"a spare is gone: {why}; a new process waits in its place")
        self._start(None)

    def _replace(self, worker: WorkerProcess, rank: int, epoch: int | None, why: str) -> None:
        mode = FaultMode.HANG if worker.is_hung else FaultMode.DEATH
        if epoch is not None:
            # First the end of the epoch, then the new place: no spare may join what has died.
            self._state.end(Fault(rank, epoch, mode, why))
            if self._state.is_done(epoch):
                raise RestartError(
                    f"rank {rank} died after the wrapped block had ended on all ranks: {why}; a "
                    "new process could not catch up with the others"
                )
        self._count_failure(rank, why)
        spare = self._spare()
        taken = "a new process" if spare is None else f"spare {spare.name}"
        self._on_note(f"rank {rank} is gone: {why}; {taken} takes its place")
        self._assign(spare or self._start(rank), rank)
        if spare is not None:
            self._start(None)

    def _count_failure(self, rank: int | None, why: str) -> None:
        self._num_failures += 1
        if rank is not None:
            self._failures[rank] += 1
        if self._num_failures <= self._job.max_restarts:
            return
        counts = ", ".join(f"rank {r} {n}x" for r, n in self._failures.most_common(8))
        who = "a spare" if rank is None else f"rank {rank}"
        raise RestartLimitError(
            f"{self._num_failures} workers have died ({counts or 'spares'}), "
            f"{self._job.max_restarts} restarts are allowed; the last one was {who}: {why}"
        )

    def _spare(self) -> WorkerProcess | None:
        """A spare that waits, else one that is starting: a new process would come later."""
        spares = [
            worker
            for name, worker in self._workers.items()
            if name not in self._ranks and worker.seconds_left() > 0
        ]
        ready = (one for one in spares if self._state.is_ready(one.name))
        return next(ready, spares[0] if spares else None)

    def _assign(self, worker: WorkerProcess, rank: int) -> None:
        self._ranks[worker.name] = rank
        self._state.assign(worker.name, self._place(rank))

    def _place(self, rank: int) -> RankInfo:
        size = self._job.num_ranks
        port = str(self._host.port)
        return RankInfo(rank, rank, size, size, (("MASTER_ADDR", _HOST), ("MASTER_PORT", port)))

    def _take_away(self, worker: WorkerProcess) -> int:
        """The exit code of a worker that is gone, or is ended now; 0 where it was taken away."""
        if self._workers.pop(worker.name, None) is None:
            return 0
        for fd in (worker.pidfd, worker.beats, *(output.fileno() for output in worker.outputs)):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        return worker.end()

    def _end_all(self) -> None:
        """Signal the workers that still run, wait for ``grace_s``, and kill the rest.

        A signal to the supervisor is passed on; a second one ends the waiting. A
        callback that raises does not keep any of them alive.
        """
        with ExitStack() as ending:
            ending.callback(self._store.close)
            ending.callback(self._selector.close)
            for worker in self._workers.values():
                ending.callback(self._take_away, worker)
            self._await_ends()

    def _await_ends(self) -> None:
        num_signals = len(self._signals)
        if self._signals:
            self._on_note(f"{signal.Signals(self._signals[0]).name}: ending all workers")
        for worker in self._workers.values():
            # A spare does nothing that it would have to bring to an end.
            is_told = self._signals and worker.name in self._ranks
            worker.signal(self._signals[0] if is_told else signal.SIGTERM)
            self._selector.modify(
                worker.pidfd, selectors.EVENT_READ, lambda w=worker: self._take_away(w)
            )
        deadline = time.monotonic() + self._job.grace_s
        while self._workers and time.monotonic() < deadline and num_signals == len(self._signals):
            self._deal_with_events(min(_POLL_S, max(0.0, deadline - time.monotonic())))


def script_command(script: str, args: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
    """What runs a script, or a module, with this Python."""
    return (sys.executable, *(("-m",) if is_module else ()), script, *args)


def _environment(job: Job, given: Mapping[str, str], port: int) -> dict[str, str]:
    num_threads = {} if job.num_ranks == 1 else {"OMP_NUM_THREADS": "1"}
    return {
        **num_threads,
        "PYTHONUNBUFFERED": "1",
        **given,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        # init_process_group(...) of a worker finds this store, and under it a place of the attempt.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        COORDINATOR: f"{_HOST}:{port}",
    }


@contextmanager
def _noting(received: list[int]) -> Iterator[int]:
    """While this is open, signals to end are noted in the list, and have no other effect.

    What it gives is readable as long as one has been received. A SIGHUP that is ignored, as under
    nohup, stays so.
    """
    ours, theirs = os.pipe()

    def note(number: int, _frame: object) -> None:
        received.append(number)
        os.write(theirs, b".")

    before = {
        number: signal.signal(number, note)
        for number in _SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield ours
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(ours)
        os.close(theirs)
