"""The processes of the ranks, as the driver sees them: started, told, waited for, killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.faults.rank import HOST, run_rank
from tests.faults.schedule import NUM_RANKS
from tests.support.ranks import forkserver

_POLL_S = 0.02
_TRACE_S = 1.0
_END_S = 60.0
_MAX_JOINS = 3

Order = tuple[str, tuple[Any, ...]]
"""A method of Rank, and its arguments."""


class StuckError(Exception):
    """A rank did not answer in time, and nothing was done to it."""


@dataclass(frozen=True, slots=True)
class Gone:
    """A rank ended without an answer; the exit code of its process."""

    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Stopped:
    """A rank does nothing, and is still there."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank came to, or Gone or Stopped; and the seconds from the order on."""

    value: Any
    seconds: float


class World:
    """Four ranks, each from ``join`` to ``kill``.

    Args:
        root: holds the directories of all nodes, and of the global checkpoints.
        variables: for the environment of the ranks.
        timeout_s: of collectives in the training, in seconds.
    """

    def __init__(self, root: Path, variables: Mapping[str, str], timeout_s: float) -> None:
        self._root, self._variables, self._timeout_s = root, dict(variables), timeout_s
        # As under torchrun, the store lives outside the ranks and outlasts each of them.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes: dict[int, tuple[ForkServerProcess, Connection]] = {}
        self._num_joins = 0

    def join(self, jump: int) -> None:
        """Start the ranks that are missing, and have all make process groups.

        Where survivors cannot, all are started anew.

        Raises:
            StuckError: they do not come together.
        """
        for _ in range(_MAX_JOINS):
            self._start_missing()
            self._num_joins += 1
            order = ("join", (f"groups{self._num_joins}", jump, self._timeout_s))
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
            now = time.monotonic()
            still = [r for r in waiting if r not in answers and self._is_stopped(r)]
            for rank in still:
                if nap_s is not None and now - asleep.setdefault(rank, now) >= nap_s:
                    self._signal(rank, signal.SIGCONT)
            if nap_s is None and all(rank in answers or rank in still for rank in waiting):
                break
            if now - began > timeout_s:
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
        return answers[rank]

    def kill(self, *ranks: int) -> None:
        """End processes at once."""
        ended = [self._processes.pop(rank) for rank in list(ranks) if rank in self._processes]
        for process, _ in ended:
            process.kill()
        for process, pipe in ended:
            process.join()
            pipe.close()
            process.close()

    def _start_missing(self) -> None:
        for rank in set(range(NUM_RANKS)) - set(self._processes):
            ours, theirs = forkserver().Pipe()
            process = forkserver().Process(
                target=run_rank,
                args=(rank, self._root, self._store.port, self._variables, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes[rank] = (process, ours)

    def _send(self, rank: int, order: Order) -> None:
        try:
            self._processes[rank][1].send(order)
        except (BrokenPipeError, ConnectionResetError):
            return  # it is gone, as will be seen

    def _receive(self, ranks: list[int], answers: dict[int, Answer], began: float) -> None:
        pipes = {self._processes[rank][1]: rank for rank in ranks}
        for pipe in wait(list(pipes), timeout=_POLL_S):
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                at, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                process, _ = self._processes[rank]
                process.join(_END_S)
                at, value = time.monotonic(), Gone(process.exitcode)
            answers[rank] = Answer(value, at - began)

    def _is_stopped(self, rank: int) -> bool:
        try:
            text = Path(f"/proc/{self._processes[rank][0].pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] == "T"

    def _signal(self, rank: int, number: signal.Signals) -> None:
        pid = self._processes[rank][0].pid
        assert pid is not None
        os.kill(pid, number)

    def _stuck(self, ranks: list[int], timeout_s: float) -> StuckError:
        for rank in self._processes:
            self._signal(rank, signal.SIGUSR1)
        time.sleep(_TRACE_S)
        return StuckError(f"ranks {ranks} have not answered within {timeout_s:g} s")
