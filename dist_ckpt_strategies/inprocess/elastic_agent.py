"""The agent of a node: what happens to a job when a worker is lost.

``run`` waits for events. ``_lose`` says what the end of a worker means, ``_lose_rank`` ends the
restart round and gives the rank to another process. ``workers.py`` has the processes, ``places.py``
the nodes of the job, ``failures.py`` what is reported.
"""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from uuid import uuid4

from dist_ckpt_strategies.errors import PeerLostError, RestartError
from dist_ckpt_strategies.inprocess.failures import Failures
from dist_ckpt_strategies.inprocess.job import (
    FENCED,
    GAVE_UP,
    KILLED,
    SIGNAL_CODE,
    Ended,
    Job,
    News,
    Placed,
    rank_info,
    script_command,
    worker_environment,
)
from dist_ckpt_strategies.inprocess.places import OUTSIDE, OnlyPlace, Places
from dist_ckpt_strategies.inprocess.rendezvous import EXIT_PREEMPTED, Fault, FaultMode
from dist_ckpt_strategies.inprocess.store_rendezvous import IDLE, RestartState
from dist_ckpt_strategies.inprocess.worker_process import ERROR_FILE, WorkerProcess
from dist_ckpt_strategies.inprocess.workers import Workers

__all__ = ["ElasticAgent", "Job", "script_command"]

_PATIENCE_S = 1.0
_POLL_S = 0.1
_LEAVE_S = 5.0
"""After one rank has left because of SIGTERM the others do, too: they were in the same save."""


class ElasticAgent:
    """Starts and replaces the workers of one node. Linux only; call ``run`` in the main thread.

    Args:
        job: what to run.
        environment: variables of the workers, to which the agent adds its own.
        on_line: called with a worker's rank or "spare", "stdout" or "stderr", and each line that
            the worker writes there.
        on_note: called with a text when something happens to a worker.

    Attributes:
        signals: those that have asked this process to end.
    """

    def __init__(
        self,
        job: Job,
        environment: Mapping[str, str],
        on_line: Callable[[str, str, bytes], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._job, self._on_note = job, on_note
        self.signals: list[int] = []
        self._inbox = _Inbox()
        self._place: Places | OnlyPlace = (
            OnlyPlace(self._inbox.put)
            if job.nodes is None
            else Places(job.nodes, self._inbox.put, on_note)
        )
        self._store = self._place.connect(on_note)
        self._state = RestartState(self._store)
        job_id = self._store.compare_set("job_id", "", uuid4().hex)
        variables = worker_environment(job, environment, self._place.address, job_id)
        self._workers = Workers(job, self._place.node, variables, on_line, self._inbox.file)
        self._failures = Failures(job, environment.get(ERROR_FILE, ""))
        self._finished: set[int] = set()
        self._left: dict[int, WorkerProcess] = {}
        self._left_at = math.inf
        self._outcome: Ended | None = None

    def run(self) -> int:
        """Run the job to its end.

        No process of the job is left on this node, however this returns or raises, but for those
        that have begun sessions of their own.

        Returns:
            The exit code: 0, one of those of ``job.py``, or 128 and the number of a signal.

        Raises:
            RestartError: workers have died too often, or one after others had finished.
        """
        with _noting(self._job.signals, self.signals, self._inbox):
            try:
                self._run_until_the_end()
            except PeerLostError as error:  # of the store, or the guard
                self._end(FENCED, error.message)
            except RestartError:
                self._failures.report(self._on_note)
                self._failures.record_end(None, is_good=False)
                raise
            finally:
                self._end_all()
        outcome = self._outcome or Ended(SIGNAL_CODE + self.signals[0], "")
        if self._outcome is not None:
            self._failures.record_end(None, is_good=outcome.code == 0)
        if outcome.code == GAVE_UP:
            self._failures.report(self._on_note)
        if outcome.why:
            self._on_note(outcome.why)
        return outcome.code

    def _run_until_the_end(self) -> None:
        try:
            self._place.start(self._workers.tell_guard)
            while self._outcome is None and not self.signals:
                self._step()
        except RestartError as error:
            self._place.close(GAVE_UP, error.message)  # a store that is lost is the caller's
            raise

    def _step(self) -> None:
        """Wait for what happens next, and handle it."""
        ended = self._workers.watch(_PATIENCE_S)
        self._read_news()
        if self._outcome is not None:  # the guard may have ended the workers
            return
        for worker in ended:
            self._lose(worker)
        for worker in self._workers:
            if worker.reap_s() <= 0:
                self._abandon(worker)
        are_all_gone = len(self._left) + len(self._finished) == self._job.num_ranks
        if self._left and (are_all_gone or time.monotonic() > self._left_at + _LEAVE_S):
            self._depart()

    def _end(self, code: int, why: str) -> None:
        self._outcome = self._outcome or Ended(code, why)

    @property
    def _is_fenced(self) -> bool:
        return self._outcome is not None and self._outcome.code == FENCED

    # News of the place

    def _read_news(self) -> None:
        """Do what the place's thread asks for; end if the guard has fired."""
        for news in self._inbox.take():
            match news:
                case Placed(place):
                    self._take_place(place)
                case Ended(code, why):
                    self._end(code, why)
                case str(text):
                    self._on_note(text)
        if self._workers.is_fenced:
            self._end(FENCED, self._workers.why_fenced())

    def _take_place(self, place: int | None) -> None:
        """Start the workers of a place of the job, or give it to those that wait; None: wait."""
        if self.signals:  # the place is given up at once
            return
        num_ranks, num_waiting = self._job.num_ranks, self._job.num_spares
        if place is None:
            num_waiting += num_ranks
        else:
            self._failures.place = place
            for rank in range(place * num_ranks, (place + 1) * num_ranks):
                self._assign(rank)
        num_spares = sum(worker.rank is None for worker in self._workers)
        for _ in range(num_spares, num_waiting):
            self._workers.start(None)

    def _assign(self, rank: int) -> WorkerProcess | None:
        """Give a rank to the spare that is returned; to a new process if there is none."""
        spare, place = self._spare(), rank // self._job.num_ranks
        info = rank_info(self._job, place, rank, self._place.address, self._place.node)
        worker = spare or self._workers.start(info)
        worker.rank = rank
        self._state.assign(worker.name, info)
        return spare

    def _spare(self) -> WorkerProcess | None:
        """A spare that waits, else one that is starting: a new process would come later."""
        spares = [
            worker
            for worker in self._workers
            if worker.rank is None and worker.seconds_left() > 0 and not worker.is_hung
        ]
        ready = (worker for worker in spares if self._state.is_ready(worker.name))
        return next(ready, spares[0] if spares else None)

    # The end of a worker

    def _lose(self, worker: WorkerProcess) -> None:
        """Do what the end of a worker asks for."""
        code, rank = self._workers.remove(worker), worker.rank
        if self.signals:  # one to all processes, or passed on
            self._note_end(worker, code)
            return
        if rank is None:
            self._lose_spare(worker, code, self._failures.reason(worker, code))
        elif code == EXIT_PREEMPTED:
            self._left_at = min(self._left_at, time.monotonic())
            self._left[rank] = worker
        elif code == 0 and self._is_done(worker):
            self._failures.record_end(rank, is_good=True)
            self._finished.add(rank)
            if len(self._finished) == self._job.num_ranks:
                self._place.finish()
        else:
            self._lose_rank(worker, rank, code)

    def _note_end(self, worker: WorkerProcess, code: int) -> None:
        """Note a rank that has ended well after a signal, with those of the other nodes."""
        with suppress(PeerLostError):
            restart_round = None if code else self._state.joined(worker.name)
            if restart_round is not None and self._state.is_done(restart_round):
                self._finished.add(worker.rank or 0)

    def _is_done(self, worker: WorkerProcess) -> bool:
        """Whether a worker has not joined a restart round, or has finished it with all others."""
        restart_round = self._state.joined(worker.name)
        return restart_round is None or self._state.is_done(restart_round)

    def _lose_rank(self, worker: WorkerProcess, rank: int, code: int) -> None:
        """A rank has died: end its restart round, and replace the worker."""
        why = self._failures.reason(worker, code)
        if code == 0 and not worker.is_hung:
            why += " in the middle of the wrapped block"
        restart_round = self._state.joined(worker.name)
        self._failures.add(worker, rank, code, restart_round)
        mode = FaultMode.HANG if worker.is_hung else FaultMode.DEATH
        # First the end of the round, then the new place: no spare may join what has died.
        self._end_round(restart_round, rank, mode, why)
        self._count_failure(rank, why)
        self._fill(rank, f"rank {rank} is gone: {why}")

    def _end_round(self, restart_round: int | None, rank: int, mode: FaultMode, why: str) -> None:
        """Have the other ranks leave the round that a rank had joined, if any.

        Raises a RestartError where a new process could not join the others.
        """
        if restart_round is None:
            if self._store.has_foreign_keys("default_pg/"):
                raise RestartError(f"rank {rank} died: {why}; {OUTSIDE}")
            return
        self._state.end(Fault(rank, restart_round, mode, why))
        if self._state.has_finished():
            raise RestartError(
                f"rank {rank} died after a wrapped block had ended on all ranks: {why}; a "
                "new process could not catch up with the others"
            )

    def _count_failure(self, rank: int | None, why: str) -> None:
        """Raise a RestartError if too many workers of the job have died."""
        if (idle := self._store.get(IDLE)) is not None:
            raise RestartError(idle)
        num_failures = self._store.add("failures")
        if num_failures > self._job.max_restarts:
            who = "a spare" if rank is None else f"rank {rank}"
            raise RestartError(
                f"{num_failures} workers have died ({self._failures.counts() or 'spares'}), "
                f"{self._job.max_restarts} restarts are allowed; the last one was {who}: {why}"
            )

    def _fill(self, rank: int, why: str) -> None:
        """Give a rank to a spare, which a new process replaces, or to a new process."""
        spare = self._assign(rank)
        taken = "a new process" if spare is None else f"spare {spare.name}"
        self._on_note(f"{why}; {taken} takes its place")
        if spare is not None:
            self._workers.start(None)

    def _lose_spare(self, worker: WorkerProcess, code: int, why: str) -> None:
        if code == 0 or (code > 0 and not self._state.is_ready(worker.name)):
            # The script does not call it, or fails without a rank: another process would, too.
            self._on_note("a spare has ended without waiting in wait_rank(); it is no spare")
            return
        if code not in {EXIT_PREEMPTED, -signal.SIGTERM}:
            self._count_failure(None, why)
        self._on_note(f"a spare is gone: {why}; a new process waits in its place")
        self._workers.start(None)

    def _abandon(self, worker: WorkerProcess) -> None:
        """Leave the job, or replace a spare: it was killed, and its process does not end."""
        why = "it was killed after its heartbeats had ended, and the kernel does not end it"
        if worker.rank is None:
            self._lose_spare(worker, self._workers.remove(worker), why)
            return
        restart_round = self._state.joined(worker.name)
        if restart_round is not None:
            self._state.end(Fault(worker.rank, restart_round, FaultMode.HANG, why))
        self._end(FENCED, f"rank {worker.rank} is gone: {why}; this node leaves the job")

    def _depart(self) -> None:
        """Ranks have left because of SIGTERM: no deaths, but the job ends, or spare nodes go on."""
        left = {rank: self._state.joined(worker.name) or 0 for rank, worker in self._left.items()}
        self._left, self._left_at = {}, math.inf
        why = f"left with exit code {EXIT_PREEMPTED}, as after a SIGTERM"
        if not self._place.is_handed_over(min(left.values())):
            ranks = ", ".join(map(str, sorted(left)))
            self._place.close(EXIT_PREEMPTED, f"ranks {ranks} have {why}; the job ends")
            return
        for rank, restart_round in left.items():
            self._state.end(Fault(rank, restart_round, FaultMode.DEATH, why))
            self._fill(rank, f"rank {rank} has {why}; a spare node takes over")

    # The end of the job on this node

    def _end_all(self) -> None:
        """Signal the workers that still run, wait for ``shutdown_timeout_s``, and kill the rest.

        A signal to the agent is passed on; a second one ends the waiting. A callback that raises
        keeps none of them alive.
        """
        limit_s = self._job.shutdown_timeout_s
        with ExitStack() as ending:
            ending.callback(self._store.close)
            ending.callback(self._workers.close)
            ending.callback(self._leave, limit_s)
            ending.callback(self._workers.kill_all)
            if not self._is_fenced:
                self._await_ends(limit_s)

    def _leave(self, limit_s: float) -> None:
        is_done = len(self._finished) == self._job.num_ranks
        self._place.leave(self.signals, limit_s, is_fenced=self._is_fenced, is_done=is_done)

    def _await_ends(self, limit_s: float) -> None:
        """Signal the workers, and wait until they end, the limit or the next signal."""
        num_signals = len(self.signals)
        if self.signals:
            self._on_note(f"{signal.Signals(self.signals[0]).name}: ending all workers")
            self._place.announce_leave()  # before any rank leaves
        for worker in self._workers:
            # A spare does nothing that it would have to bring to an end.
            is_told = self.signals and worker.rank is not None
            worker.signal(self.signals[0] if is_told else signal.SIGTERM)
        began = time.monotonic()
        left_s = limit_s
        while self._workers and left_s > 0 and num_signals == len(self.signals):
            for worker in self._workers.wait(min(_POLL_S, left_s)):
                self._note_end(worker, self._workers.remove(worker))
            self._read_news()
            left_s = began + limit_s - time.monotonic()
        ranks = sorted(worker.rank for worker in self._workers if worker.rank is not None)
        if ranks:
            if self._outcome is None or self._outcome.code > SIGNAL_CODE:
                self._outcome = Ended(KILLED, "")
            self._on_note(
                f"ranks {', '.join(map(str, ranks))} have not ended {time.monotonic() - began:.1f} "
                "s after the signal and are killed: what they did since their last complete "
                f"checkpoint is probably lost (--shutdown-timeout {limit_s:g})"
            )


class _Inbox:
    """News for the main thread; ``file`` can be read when some, or a signal, has come."""

    def __init__(self) -> None:
        self.file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news: SimpleQueue[News] = SimpleQueue()

    def put(self, news: News) -> None:
        """Add news; for any thread."""
        self._news.put(news)
        self.wake()

    def wake(self) -> None:
        """End the main thread's wait."""
        os.eventfd_write(self.file, 1)

    def take(self) -> Iterator[News]:
        """The news that have come since the call before."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.file)
        while not self._news.empty():
            yield self._news.get()

    def close(self) -> None:
        os.close(self.file)


@contextmanager
def _noting(signals: Sequence[int], received: list[int], inbox: _Inbox) -> Iterator[None]:
    """While this is open, these signals are noted in the list, and have no other effect.

    A SIGHUP that is ignored, as under nohup, stays so.
    """

    def note(number: int, _frame: object) -> None:
        received.append(number)
        inbox.wake()

    before = {
        number: signal.signal(number, note)
        for number in signals
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        inbox.close()
