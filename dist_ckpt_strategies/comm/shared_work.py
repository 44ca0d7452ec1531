"""Tasks that one process works off on threads, or all ranks of a group together.

Imports torch only where there are several ranks: commands that look at files go without it.
"""

from __future__ import annotations

import hashlib
import heapq
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dist_ckpt_strategies.errors import PeerTimeoutError, PlanError
from dist_ckpt_strategies.storage.io_pool import Job, Transfer, raise_if_cancelled

if TYPE_CHECKING:
    from dist_ckpt_strategies.comm.base import Communicator

T = TypeVar("T")
Task = TypeVar("Task")
Watch = Callable[[int, int], None]
"""Called with how much of a step is done and how much there is; the second may still grow."""

Count = Callable[[int], None]

_PAUSE_S = 0.2
"""Between two reports of progress, and two looks at the other ranks."""

_STOP_S = 10.0
"""Longest wait for threads whose work is no longer wanted."""

_TASK_NBYTES = 64 << 10
"""Fixed cost of a task, in bytes: opening a file, for instance."""


class Ranks:
    """The ranks that share the work of a tool: those of a communicator, or this process alone.

    Every method is collective where there are several ranks. The failure of a step on one of them
    is raised on all, with rank, key and file.
    """

    def __init__(self, comm: Communicator | None) -> None:
        self._comm = None if comm is None or comm.size == 1 else comm
        self.rank, self.size = (0, 1) if self._comm is None else (self._comm.rank, self._comm.size)

    def run(self, step: Callable[[], T]) -> T:
        """Run a step on every rank; returns this rank's result."""
        results: list[T] = []
        self.gather(lambda: results.append(step()))
        return results[0]

    def gather(self, step: Callable[[], Any]) -> list[Any]:
        """Run a step on every rank; returns all results, which are pickled, by rank."""
        if self._comm is None:
            return [step()]
        from dist_ckpt_strategies.comm.base import run_and_gather  # noqa: PLC0415

        answers = run_and_gather(self._comm, lambda: pickle.dumps(step()).decode("latin-1"))
        return [pickle.loads(answer.encode("latin-1")) for answer in answers]  # noqa: S301 - peers

    def run_on_first(self, step: Callable[[], Any]) -> Any:
        """Run a step on the first rank; returns its result on every rank."""
        return self.gather(lambda: step() if self.rank == 0 else None)[0]

    def require_alike(self, sizes: Sequence[int]) -> None:
        """Raise a PlanError unless all ranks have listed tasks of the same sizes."""
        if len({*self.gather(lambda: hashlib.sha256(repr(sizes).encode()).hexdigest())}) > 1:
            raise PlanError(
                "the ranks see different checkpoints; every rank needs the same file system and "
                "the same options, and nothing may be written there meanwhile"
            )

    def share(
        self,
        tasks: Sequence[Task],
        nbytes_of: Callable[[Task], int],
        work: Callable[[Task, Count], T],
        *,
        num_threads: int,
        watch: Watch | None = None,
    ) -> dict[int, T]:
        """Work off tasks, each on one rank; this rank's results by number of the task.

        Ranks that have listed different tasks raise a PlanError. Each gets about as many bytes.
        ``work`` runs on any thread, and reports its bytes to its second argument; a failure ends
        the work of all threads and ranks at their next report. ``watch`` is called on the calling
        thread with the bytes done by all ranks, and those of all tasks.
        """
        sizes = [nbytes_of(task) for task in tasks]
        self.require_alike(sizes)
        owners = assign_lpt([nbytes + _TASK_NBYTES for nbytes in sizes], self.size)
        own = _Progress(tasks, work)
        done_nbytes = 0

        def report() -> None:
            if watch is not None:
                watch(done_nbytes, sum(sizes))

        def state() -> list[int]:
            report()
            num_running = transfer.num_running_after(_PAUSE_S)
            if own.failure is not None:
                raise own.failure
            return [own.done_nbytes, num_running]

        def finish() -> None:
            transfer.wait(_STOP_S)
            report()

        numbers = [number for number, owner in enumerate(owners) if owner == self.rank]
        transfer = Transfer((Job("", "", partial(own.run, n)) for n in numbers), num_threads)
        try:
            is_running = True
            while is_running:
                states = self.gather(state)
                done_nbytes = sum(nbytes for nbytes, _ in states)
                is_running = any(num_running for _, num_running in states)
            self.run(finish)
        finally:
            transfer.stop(_STOP_S)
        return own.results


@contextmanager
def open_world(
    rank: int, size: int, store: Any, *, start_s: float, timeout_s: float
) -> Iterator[Communicator]:
    """The ranks of a tool, as the world of a gloo process group. Collective.

    All have to join within ``start_s``, or it is a PeerTimeoutError; after that ``timeout_s`` is
    the longest wait for a peer. Without a store, it is the one that torchrun's environment names.
    """
    import torch.distributed as dist  # noqa: PLC0415

    # Before there is a world: its functions would keep the world as a default argument, and with it
    # gloo's threads, which abort a process if they release a tensor while the interpreter exits.
    import torch.distributed.nn.functional  # noqa: F401, PLC0415

    from dist_ckpt_strategies.comm.torch_communicator import open_communicator  # noqa: PLC0415

    limit = timedelta(seconds=start_s)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=limit)
    except RuntimeError as error:
        raise PeerTimeoutError(
            None, f"{size} ranks did not find each other within {start_s:g} s: {error}"
        ) from error
    try:
        yield open_communicator(None, timeout_s=timeout_s, purpose="tool")
    except KeyboardInterrupt:
        raise  # another thread may be in a collective: this process ends as it is
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


class _Progress(Generic[Task, T]):
    """Progress of threads on tasks: results by number, bytes, and the first failure."""

    def __init__(self, tasks: Sequence[Task], work: Callable[[Task, Count], T]) -> None:
        self._tasks, self._work = tasks, work
        self._lock = threading.Lock()
        self.results: dict[int, T] = {}
        self.done_nbytes = 0
        self.failure: BaseException | None = None

    def run(self, number: int) -> None:
        """Work a task off."""
        try:
            self.results[number] = self._work(self._tasks[number], self._count)
        except BaseException as error:
            self.failure = self.failure or error
            raise

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.done_nbytes += nbytes
        raise_if_cancelled()  # the work is no longer wanted


def assign_lpt(nbytes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that takes each item: the largest first, each to the rank that has the least."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(nbytes)
    for item in sorted(range(len(nbytes)), key=lambda number: (-nbytes[number], number)):
        load, owners[item] = loads[0]
        heapq.heapreplace(loads, (load + nbytes[item], owners[item]))
    return owners
