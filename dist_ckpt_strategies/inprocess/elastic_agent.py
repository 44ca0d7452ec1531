"""Starts the workers of a job on this node, and replaces those that die.

The nodes of a job are in ``places.py``.
"""

import json
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from uuid import uuid4

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

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.config import JOB, PLACE, RENDEZVOUS
from dist_ckpt_strategies.errors import PeerLostError, RestartError, text_of
from dist_ckpt_strategies.inprocess.node_guard import NodeGuard
from dist_ckpt_strategies.inprocess.places import (
    FENCED,
    GAVE_UP,
    KILLED,
    OUTSIDE,
    SIGNAL_CODE,
    Nodes,
    Places,
    connected_store,
)
from dist_ckpt_strategies.inprocess.rendezvous import (
    EXIT_PREEMPTED,
    Fault,
    FaultMode,
    RankInfo,
    environment_of,
)
from dist_ckpt_strategies.inprocess.store_rendezvous import IDLE, RestartState
from dist_ckpt_strategies.inprocess.worker_process import WorkerProcess, reason_of

_HOST = "127.0.0.1"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_S = 1.0
_AWAY_S = 0.5
_POLL_S = 0.1
_LEAVE_S = 5.0
"""After one rank has left because of SIGTERM the others do, too: they were in the same save."""

_GUARD_GONE = "the guard of this node's workers is gone"
_CHUNK = 1 << 16
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torch's ``@record`` writes what a process has raised."""


@dataclass(frozen=True, slots=True)
class Job:
    """What an elastic agent runs.

    Attributes:
        command: program and arguments of every worker.
        num_ranks: number of ranks of this node.
        num_spares: number of processes that wait, with everything imported, to take over a rank.
        max_restarts: number of workers that may be replaced, in total.
        heartbeat_timeout_s: seconds without a heartbeat before a worker counts as hung; 0: no
            check.
        shutdown_timeout_s: seconds that workers have to end by themselves after a signal.
        nodes: nodes of the job; None: this one alone, with a store of its own.
        event_log_handler: torch's name of the handler of its events.
    """

    command: tuple[str, ...]
    num_ranks: int
    num_spares: int = 0
    max_restarts: int = 16
    heartbeat_timeout_s: float = 30.0
    shutdown_timeout_s: float = 30.0
    nodes: Nodes | None = None
    event_log_handler: str = "null"


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
        self._job = job
        self._on_line, self._on_note = on_line, on_note
        self._news: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._places: Places | None = None
        self._wake: int | None = None
        is_store_only = job.nodes is not None and job.nodes.is_store_only
        fence_s = job.nodes.fence_s if job.nodes else math.inf
        self._guard = None if is_store_only else NodeGuard(fence_s)
        if job.nodes is None:
            self._host = host_store(_HOST)
            self._address = _HOST, int(self._host.port)
            self._store = JobStore(*self._address)
        else:
            self._address = job.nodes.endpoint
            self._places = Places(
                job.nodes,
                lambda begun: self._tell_guard(f"renewed {begun}"),
                lambda: self._post(self._start_as_spare),
                lambda text: self._post(partial(on_note, text)),
            )
            self._renewal = threading.Thread(
                target=self._keep_place, args=(self._places,), name="dist-ckpt-place", daemon=True
            )
            self._store = connected_store(job.nodes, on_note)
        self._environment = _environment(job, environment, self._address, self._store)
        self._own_error_file = environment.get(_ERROR_FILE)
        self._errors = TemporaryDirectory(prefix="dist-ckpt-errors-")
        self._state = RestartState(self._store)
        self._workers: dict[str, WorkerProcess] = {}
        self._ranks: dict[str, int] = {}
        self._finished: set[int] = set()
        self._left: dict[str, float] = {}
        self.signals: list[int] = []
        self._outcome: tuple[int, str] | None = None
        self._failures: defaultdict[int, list[ProcessFailure]] = defaultdict(list)
        self._num_started = self._place = 0

    def run(self) -> int:
        """Run the job to its end.

        No process of the job is left on this node, however this returns or raises, but for those
        that have begun sessions of their own.

        Returns:
            The exit code: 0, one of those of ``places``, or 128 and the number of a signal.

        Raises:
            RestartError: workers have died too often, or one after others had finished.
        """
        with _noting(self.signals) as (inbox, self._wake):
            self._selector.register(inbox, selectors.EVENT_READ, lambda: self._read_news(inbox))
            if self._guard is not None:
                self._selector.register(self._guard.fired, selectors.EVENT_READ, self._fence)
            try:
                if self._places is None:
                    self._take_place(0)
                    self._run_until_the_end()
                else:
                    self._run_as_one_of_several(self._places)
            except RestartError:
                self._report_failures()
                self._record("FAILED", None)
                raise
            finally:
                self._selector.unregister(inbox)
                self._end_all()
        code, why = self._outcome or (SIGNAL_CODE + self.signals[0], "")
        if self._outcome is not None:
            self._record("FAILED" if code else "SUCCEEDED", None)
        if code == GAVE_UP:
            self._report_failures()
        if why:
            self._on_note(why)
        return code

    def _run_until_the_end(self) -> None:
        while self._outcome is None and not self.signals:
            are_all_gone = len(self._left) + len(self._finished) == self._job.num_ranks
            is_late = time.monotonic() > min(self._left.values(), default=math.inf) + _LEAVE_S
            if self._left and (are_all_gone or is_late):
                self._depart()
            else:
                self._step()

    def _run_as_one_of_several(self, places: Places) -> None:
        self._renewal.start()
        try:
            try:
                self._run_until_the_end()
            except RestartError as error:
                places.close(GAVE_UP, error.message)
                raise
        except PeerLostError as error:
            self._end(FENCED, error.message)

    def _keep_place(self, places: Places) -> None:
        """On a thread of its own, until the job ends, or this node's part in it."""
        try:
            place = places.take()
            if place is not None:
                self._post(partial(self._take_place, place))
            outcome = places.hold()
        except RestartError as error:
            outcome = GAVE_UP, error.message
        except Exception as error:  # noqa: BLE001 - whatever it is, nothing renews the place
            outcome = FENCED, text_of(error)
        self._post(lambda: self._end(*outcome))
        if outcome[0] == FENCED:  # the main thread may be held up
            with suppress(PeerLostError):  # the guard is gone: it has fired
                self._tell_guard("fence")

    def _post(self, news: Callable[[], object]) -> None:
        """Have the main thread call something."""
        if self._wake is None:  # not running yet: this is the main thread
            news()
            return
        self._news.put(news)
        os.write(self._wake, b".")

    def _read_news(self, inbox: int) -> None:
        os.read(inbox, _CHUNK)
        while not self._news.empty():
            self._news.get()()

    def _end(self, code: int, why: str) -> None:
        self._outcome = self._outcome or (code, why)

    def _fence(self) -> None:
        why = _GUARD_GONE
        if self._job.nodes and self._guard and not self._guard.was_killed():
            why = f"this node could not renew its place for {self._job.nodes.fence_s:g} s"
        self._end(FENCED, why)

    def _tell_guard(self, line: str) -> None:
        try:
            if self._guard is not None:
                self._guard.tell(line)
        except OSError as error:
            raise PeerLostError(None, f"{_GUARD_GONE}: {error}") from error

    def _start_as_spare(self) -> None:
        self._on_note("all places are taken; this node waits as a spare")
        for _ in range(self._job.num_ranks + self._job.num_spares):
            self._start(None)

    def _take_place(self, place: int) -> None:
        """Start the workers of a place of the job, or give it to those that wait."""
        self._place = place
        if self._places is not None:
            self._on_note(f"this node has place {place}")
        first = place * self._job.num_ranks
        for rank in range(first, first + self._job.num_ranks):
            self._assign(self._spare() or self._start(rank), rank)
        while len(self._workers) - len(self._ranks) < self._job.num_spares:
            self._start(None)

    def _step(self) -> None:
        """Wait for the next event and handle it."""
        left_s = (worker.seconds_left() for worker in self._workers.values())
        patience_s = max(0.0, min([_PATIENCE_S, *left_s]))
        started = time.monotonic()
        events = self._selector.select(patience_s)
        # Where this process was stopped itself, it knows nothing of the silence of others.
        was_away = time.monotonic() - started > patience_s + _AWAY_S
        self._handle(events)
        for worker in list(self._workers.values()):
            if was_away:
                worker.excuse()
            if worker.seconds_left() <= 0 and not worker.hear_waiting():
                worker.is_hung = True
                worker.kill()
            elif worker.reap_s() <= 0:
                self._abandon(worker)

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in events:
            # What one event has closed, others of the same moment may still name.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def _start(self, rank: int | None) -> WorkerProcess:
        node = "" if self._places is None else f"{self._places.node}/"
        name = f"{node}worker{self._num_started}"
        self._num_started += 1
        place = {} if rank is None else environment_of(self._info(rank))
        worker = WorkerProcess(
            name,
            self._job.command,
            {**self._environment, **place, _ERROR_FILE: self._error_file(name)},
            self._job.heartbeat_timeout_s,
            lambda stream, line: self._on_line(str(self._ranks.get(name, "spare")), stream, line),
        )
        self._workers[name] = worker
        self._tell_guard(f"+{worker.pid}")
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
        if self._guard is not None and self._guard.has_fired():
            self._fence()
            return
        code = self._take_away(worker)
        rank = self._ranks.get(worker.name)
        if self.signals or (code == EXIT_PREEMPTED and rank is not None):  # one to all, or to it
            self._left[worker.name] = time.monotonic()
            return
        failure = self._failure(worker, rank, code)
        why = reason_of(code)
        if worker.is_hung:
            why = f"no heartbeat for {self._job.heartbeat_timeout_s:g} s"
        elif isinstance(message := failure.error_file_data["message"], dict):
            why += f": {message['message']}"
        if rank is None:
            self._lose_spare(worker.name, code, why)
            return
        restart_round = self._state.joined(worker.name)
        if code == 0 and (restart_round is None or self._state.is_done(restart_round)):
            self._record("SUCCEEDED", rank)
            self._finish(rank)
            return
        if code == 0:
            why += " in the middle of the wrapped block"
        self._record("FAILED", rank, failure)
        self._failures[rank].append(failure)
        self._replace(worker, rank, restart_round, why)

    def _finish(self, rank: int) -> None:
        self._finished.add(rank)
        if len(self._finished) < self._job.num_ranks:
            return
        if self._places is None:
            self._end(0, "")
        else:
            self._places.finish()

    def _depart(self) -> None:
        """Ranks have left because of SIGTERM: no death, but the end of the job, or a new begin."""
        left = {self._ranks[name]: self._state.joined(name) or 0 for name in self._left}
        self._left.clear()
        ranks = ", ".join(map(str, sorted(left)))
        why = f"left with exit code {EXIT_PREEMPTED}, as after a SIGTERM"
        if self._places is None:
            self._end(EXIT_PREEMPTED, f"ranks {ranks} have {why}; the job ends")
        elif self._places.is_handed_over(min(left.values())):
            for rank, joined in left.items():
                self._state.end(Fault(rank, joined, FaultMode.DEATH, why))
                self._fill(rank, f"rank {rank} has {why}; a spare node takes over")
        else:
            self._places.close(EXIT_PREEMPTED, f"ranks {ranks} have {why}")

    def _abandon(self, worker: WorkerProcess) -> None:
        """Leave the job, or replace a spare: it was killed, and its process does not end."""
        rank, restart_round = self._ranks.get(worker.name), self._state.joined(worker.name)
        why = "it was killed after its heartbeats had ended, and the kernel does not end it"
        if rank is None:
            self._lose_spare(worker.name, self._take_away(worker), why)
            return
        if restart_round is not None:
            self._state.end(Fault(rank, restart_round, FaultMode.HANG, why))
        self._end(FENCED, f"rank {rank} is gone: {why}; this node leaves the job")

    def _failure(self, worker: WorkerProcess, rank: int | None, code: int) -> ProcessFailure:
        """What is known of a worker's end, with what ``@record`` has written."""
        local_rank = -1 if rank is None else rank % self._job.num_ranks
        try:
            return ProcessFailure(local_rank, worker.pid, code, self._error_file(worker.name))
        except (ValueError, KeyError, TypeError):  # it was killed while it wrote the file
            return ProcessFailure(local_rank, worker.pid, code, "")

    def _record(self, state: str, rank: int | None, failure: ProcessFailure | None = None) -> None:
        """Record torch's event of the end of a worker, or of this agent."""
        nodes = self._job.nodes
        metadata: dict[str, EventMetadataValue] = {
            "run_id": "none" if nodes is None else nodes.run_id,
            "global_rank": rank,
            "group_rank": self._place,
            "hostname": socket.gethostname(),
            "state": state,
            "raw_error": None if failure is None else json.dumps(failure.error_file_data),
            "agent_restarts": sum(map(len, self._failures.values())),
        }
        source = EventSource.AGENT if rank is None else EventSource.WORKER
        name = f"torchelastic.worker.status.{state}"
        record(Event(name, source, metadata=metadata), self._job.event_log_handler)

    def _error_file(self, name: str) -> str:
        return str(Path(self._errors.name, f"{name.rpartition('/')[2]}.json"))

    def _report_failures(self) -> None:
        """As torchrun does: the last failure of each rank of this node, with its traceback."""
        if not self._failures:
            return
        last = {rank: failures[-1] for rank, failures in sorted(self._failures.items())}
        found = ChildFailedError(" ".join(self._job.command), last)
        for line in str(found).strip().splitlines():
            self._on_note(line)
        _, first = found.get_first_failure()
        if self._own_error_file and Path(first.error_file).exists():
            ErrorHandler().dump_error_file(first.error_file, first.exitcode)

    def _lose_spare(self, name: str, code: int, why: str) -> None:
        if code == 0 or (code > 0 and not self._state.is_ready(name)):
            # The script does not call it, or fails without a rank: another process would, too.
            self._on_note("a spare has ended without waiting in wait_rank(); it is no spare")
            return
        if code not in {EXIT_PREEMPTED, -signal.SIGTERM}:
            self._count_failure(None, why)
        self._on_note(f"a spare is gone: {why}; a new process waits in its place")
        self._start(None)

    def _replace(
        self, worker: WorkerProcess, rank: int, restart_round: int | None, why: str
    ) -> None:
        mode = FaultMode.HANG if worker.is_hung else FaultMode.DEATH
        if restart_round is not None:
            # First the end of the round, then the new place: no spare may join what has died.
            self._state.end(Fault(rank, restart_round, mode, why))
            if self._state.has_finished():
                raise RestartError(
                    f"rank {rank} died after a wrapped block had ended on all ranks: {why}; a "
                    "new process could not catch up with the others"
                )
        elif self._store.has_foreign_keys("default_pg/"):
            raise RestartError(f"rank {rank} died: {why}; {OUTSIDE}")
        self._count_failure(rank, why)
        self._fill(rank, f"rank {rank} is gone: {why}")

    def _fill(self, rank: int, why: str) -> None:
        """Give a rank to a spare or a new process."""
        spare = self._spare()
        taken = "a new process" if spare is None else f"spare {spare.name}"
        self._on_note(f"{why}; {taken} takes its place")
        self._assign(spare or self._start(rank), rank)
        if spare is not None:
            self._start(None)

    def _count_failure(self, rank: int | None, why: str) -> None:
        if (idle := self._store.get(IDLE)) is not None:
            raise RestartError(idle)
        num_failures = self._store.add("failures")
        if num_failures <= self._job.max_restarts:
            return
        by_number = sorted(self._failures.items(), key=lambda item: -len(item[1]))
        counts = ", ".join(f"rank {r} {len(found)}x" for r, found in by_number[:8])
        who = "a spare" if rank is None else f"rank {rank}"
        raise RestartError(
            f"{num_failures} workers have died ({counts or 'spares'}), "
            f"{self._job.max_restarts} restarts are allowed; the last one was {who}: {why}"
        )

    def _spare(self) -> WorkerProcess | None:
        """A spare that waits, else one that is starting: a new process would come later."""
        spares = [
            worker
            for name, worker in self._workers.items()
            if name not in self._ranks and worker.seconds_left() > 0 and not worker.is_hung
        ]
        ready = (one for one in spares if self._state.is_ready(one.name))
        return next(ready, spares[0] if spares else None)

    def _assign(self, worker: WorkerProcess, rank: int) -> None:
        self._ranks[worker.name] = rank
        self._state.assign(worker.name, self._info(rank))

    def _info(self, rank: int) -> RankInfo:
        size, nodes = self._job.num_ranks, self._job.nodes
        world_size = size if nodes is None else size * nodes.num_nodes
        host, port = self._address
        variables = {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "GROUP_RANK": str(self._place),
            "GROUP_WORLD_SIZE": str(world_size // size),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(world_size),
        }
        if self._places is not None:
            variables[PLACE] = f"place/{self._place}={self._places.node}"
        return RankInfo(rank, rank % size, world_size, size, tuple(variables.items()))

    def _take_away(self, worker: WorkerProcess) -> int:
        """The exit code of a worker that is gone, or is ended now; 0 where it was taken away."""
        if self._workers.pop(worker.name, None) is None:
            return 0
        for fd in (worker.pidfd, worker.beats, *(output.fileno() for output in worker.outputs)):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        code = worker.end()
        if self._guard is not None and not self._guard.has_fired():
            self._tell_guard(f"-{worker.pid}")
        return code

    def _end_all(self) -> None:
        """Signal the workers that still run, wait for ``shutdown_timeout_s``, and kill the rest.

        A signal to the agent is passed on; a second one ends the waiting. A
        callback that raises does not keep any of them alive.
        """
        with ExitStack() as ending:
            ending.callback(self._errors.cleanup)
            ending.callback(self._store.close)
            ending.callback(self._selector.close)
            if self._guard is not None:
                ending.callback(self._guard.close)
            if self._places is not None:
                ending.callback(self._leave, self._places)
            ending.callback(self._kill_all)
            if not self._is_fenced():
                self._await_ends()

    def _kill_all(self) -> None:
        with ExitStack() as ending:
            for worker in self._workers.values():
                worker.kill()
                ending.callback(self._take_away, worker)

    def _is_fenced(self) -> bool:
        return self._outcome is not None and self._outcome[0] == FENCED

    def _leave(self, places: Places) -> None:
        """Give up the place, and all that keeps it."""
        places.stop()
        self._renewal.join(_AWAY_S if self._is_fenced() else None)
        if not self._is_fenced():
            places.shutdown(self.signals, self._job.shutdown_timeout_s)

    def _await_ends(self) -> None:
        num_signals = len(self.signals)
        if self.signals:
            self._on_note(f"{signal.Signals(self.signals[0]).name}: ending all workers")
            if self._places is not None:  # before any rank leaves
                self._places.announce_leave()
        for worker in self._workers.values():
            # A spare does nothing that it would have to bring to an end.
            is_told = self.signals and worker.name in self._ranks
            worker.signal(self.signals[0] if is_told else signal.SIGTERM)
            self._selector.modify(
                worker.pidfd, selectors.EVENT_READ, lambda w=worker: self._take_away(w)
            )
        began = time.monotonic()
        deadline = began + self._job.shutdown_timeout_s
        while self._workers and time.monotonic() < deadline and num_signals == len(self.signals):
            wait_s = min(_POLL_S, max(0.0, deadline - time.monotonic()))
            self._handle(self._selector.select(wait_s))
        ranks = sorted(self._ranks[name] for name in self._workers if name in self._ranks)
        if ranks:
            if self._outcome is None or self._outcome[0] > SIGNAL_CODE:
                self._outcome = KILLED, ""
            self._on_note(
                f"ranks {', '.join(map(str, ranks))} have not ended {time.monotonic() - began:.1f} "
                "s after the signal and are killed: what they did since their last complete "
                f"checkpoint is probably lost (--shutdown-timeout {self._job.shutdown_timeout_s:g})"
            )


def script_command(script: str, args: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
    """What runs a script, or a module, with this Python."""
    return (sys.executable, *(("-m",) if is_module else ()), script, *args)


def _environment(
    job: Job, given: Mapping[str, str], address: tuple[str, int], store: JobStore
) -> dict[str, str]:
    host, port = address
    num_threads = {} if job.num_ranks == 1 else {"OMP_NUM_THREADS": "1"}
    return {
        **num_threads,
        "TORCHELASTIC_RUN_ID": "none" if job.nodes is None else job.nodes.run_id,
        "ROLE_NAME": "default",
        "PYTHONUNBUFFERED": "1",
        **given,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # init_process_group(...) of a worker finds this store, and under it a place of the attempt.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        RENDEZVOUS: f"{host}:{port}",
        JOB: store.compare_set("job_id", "", uuid4().hex),
    }


@contextmanager
def _noting(received: list[int]) -> Iterator[tuple[int, int]]:
    """While this is open, signals to end are noted in the list, and have no other effect.

    What it gives are the two ends of a pipe, into which each of them is noted as well. A SIGHUP
    that is ignored, as under nohup, stays so.
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
        yield ours, theirs
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(ours)
        os.close(theirs)
