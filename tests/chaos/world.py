"""The processes of the ranks, as the driver sees them: started, told, waited for, killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch._C._distributed_c10d import TCPStore

from tests.chaos.orders import Join, Order
from tests.chaos.rank import HOST, Place, run_rank
from tests.chaos.schedule import NUM_RANKS
from tests.support.ranks import forkserver

_POLL_S = 0.02
_TRACE_S = 1.0
_END_S = 60.0
_MAX_MEETINGS = 3


class StuckError(Exception):
    """A rank did not answer in time, and nothing was done to it."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank ended without an answer.

    Attributes:
        exit_code: of its process.
    """

    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """A rank does nothing, and is still there."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank came to.

    Attributes:
        value: its answer, or Gone or Stopped.
        seconds: from the order on.
    """

    value: Any
    seconds: float


@dataclass(slots=True)
class _Process:
    process: ForkServerProcess
    pipe: Connection


class World:
    """Four ranks. Leaving the block ends all of their processes.

    Args:
        root: holds the directories of all nodes, and of the global checkpoints.
        variables: for the environment of the ranks.
        timeout_s: of meetings in the training, in seconds.
    """

    def __init__(self, root: Path, variables: Mapping[str, str], timeout_s: float) -> None:
        self._root = root
        self._variables = dict(variables)
        self._timeout_s = timeout_s
        self._context = forkserver()
        # As under torchrun, the store lives outside the ranks and outlasts each of them.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes: dict[int, _Process] = {}
        self._num_meetings = 0
        self.num_started = 0

    def __enter__(self) -> Self:
        """The world itself; nobody is there yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End all processes."""
        self.kill(*self._processes)

    def meet(self, jump: int) -> None:
        """Start the ranks that are missing, and let all make process groups.

        Where survivors cannot, all are started anew.
        """
        for _ in range(_MAX_MEETINGS):
            self._start_missing()
            self._num_meetings += 1
            order = Join(f"meeting{self._num_meetings}", jump, self._timeout_s)
            answers = self.ask(dict.fromkeys(range(NUM_RANKS), order), 2 * self._timeout_s)
            if all(answer.value is None for answer in answers.values()):
                return
            self.kill(*self._processes)
        raise StuckError(f"the ranks do not come together: {answers}")

    def ask(
        self, orders: Mapping[int, Order], timeout_s: float, *, nap_s: float | None = None
    ) -> dict[int, Answer]:
        """Give orders, and wait for what the ranks come to.

        Args:
            orders: by rank.
            timeout_s: by which all have answered but those that are stopped.
            nap_s: after so many seconds a stopped rank is told to go on.

        Raises:
            StuckError: one has not, and is not stopped. The ranks have written where they are.
        """
        began = time.monotonic()
        for rank, order in orders.items():
            self._send(rank, order)
        answers: dict[int, Answer] = {}
        asleep: dict[int, float] = {}
        while waiting := [rank for rank in orders if rank not in answers]:
            self._receive(waiting, answers, began)
            for rank in waiting:
                if rank not in answers and self._is_stopped(rank):
                    asleep.setdefault(rank, time.monotonic())
            if nap_s is not None:
                self._wake_those_due(asleep, nap_s)
            elif all(rank in answers or self._is_stopped(rank) for rank in waiting):
                break
            if time.monotonic() - began > timeout_s:
                raise self._stuck([rank for rank in waiting if rank not in answers], timeout_s)
        late = Answer(Stopped(), time.monotonic() - began)
        return {rank: answers.get(rank, late) for rank in orders}

    def wake(self, rank: int, timeout_s: float) -> Answer:
        """Let a stopped rank go on, and wait for what it comes to.

        Raises:
            StuckError: nothing, within the time.
        """
        began = time.monotonic()
        self._signal(rank, signal.SIGCONT)
        answers: dict[int, Answer] = {}
        while not answers:
            self._receive([rank], answers, began)
            if time.monotonic() - began > timeout_s:
                raise self._stuck([rank], timeout_s)
        return replace(answers[rank], seconds=time.monotonic() - began)

    def kill(self, *ranks: int) -> None:
        """End processes at once."""
        ended = [self._processes.pop(rank) for rank in list(ranks) if rank in self._processes]
        for one in ended:
            one.process.kill()
        for one in ended:
            one.process.join()
            one.pipe.close()
            one.process.close()

    def _start_missing(self) -> None:
        for rank in range(NUM_RANKS):
            if rank in self._processes:
                continue
            place = Place(rank, self._root, self._store.port, self._variables)
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=run_rank, args=(place, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes[rank] = _Process(process, ours)
            self.num_started += 1

    def _send(self, rank: int, order: Order) -> None:
        try:
            self._processes[rank].pipe.send(order)
        except (BrokenPipeError, ConnectionResetError):
            return  # it is gone, as will be seen

    def _receive(self, ranks: list[int], answers: dict[int, Answer], began: float) -> None:
        pipes = {self._processes[rank].pipe: rank for rank in ranks}
        for pipe in wait(list(pipes), timeout=_POLL_S):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                at, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                process = self._processes[rank].process
                process.join(_END_S)
                at, value = time.monotonic(), Gone(process.exitcode)
            answers[rank] = Answer(value, at - began)

    def _is_stopped(self, rank: int) -> bool:
        try:
            text = Path(f"/proc/{self._processes[rank].process.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def _wake_those_due(self, asleep: dict[int, float], nap_s: float) -> None:
        for rank, since in asleep.items():
            if time.monotonic() - since >= nap_s and self._is_stopped(rank):
                self._signal(rank, signal.SIGCONT)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank].process.pid
        assert pid is not None
        os.kill(pid, number)

    def _stuck(self, ranks: list[int], timeout_s: float) -> StuckError:
        for rank in self._processes:
            self._signal(rank, signal.SIGUSR1)
        time.sleep(_TRACE_S)
        return StuckError(f"ranks {ranks} have not answered within {timeout_s:g} s")
