"""The processes of the ranks, as the driver sees them: started, instructed, waited for, killed."""

import math
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from tests.faults.oracle import NUM_RANKS
from tests.faults.rank import HOST, run_rank
from tests.support.processes import process_state
from tests.support.ranks import Processes

_POLL_S = 0.02
_TRACE_S = 1.0
_MAX_JOINS = 3

Order = tuple[str, tuple[Any, ...]]  # a method of Rank, and its arguments


class ViolationError(Exception):
    """Something that must never happen did."""


class World:
    """Four ranks, each from ``join`` to ``kill``."""

    def __init__(self, root: Path, variables: Mapping[str, str], timeout_s: float) -> None:
        self._root, self._variables, self._timeout_s = root, dict(variables), timeout_s
        # As under torchrun, the store lives outside the ranks and outlasts each of them.
        self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._processes = Processes()
        self._num_joins = 0

    def join(self, jump: int) -> None:
        """Start the ranks that are missing, and have all make process groups.

        Where survivors cannot, all are started anew.
        """
        for _ in range(_MAX_JOINS):
            for rank in set(range(NUM_RANKS)) - self._processes.ranks():
                task = (self._root, self._store.port, self._variables)
                self._processes.start(rank, run_rank, *task)
            self._num_joins += 1
            answers = self.ask_all("join", f"groups{self._num_joins}", jump, self._timeout_s)
            if all(answer is None for answer in answers.values()):
                return
            self.kill(*range(NUM_RANKS))
        raise ViolationError(f"the ranks do not come together: {answers}")

    def ask_all(self, name: str, *args: Any) -> dict[int, Any]:
        """Give all ranks the same order; see ``ask``."""
        return self.ask(dict.fromkeys(range(NUM_RANKS), (name, args)))

    def ask(
        self, orders: Mapping[int, Order], timeout_s: float = 120.0, *, nap_s: float = math.inf
    ) -> dict[int, Any]:
        """Give orders, and wait for what the ranks come to; see ``Processes.receive``.

        Args:
            orders: by rank.
            timeout_s: by which all have answered, or, from when it is to go on, a stopped one.
            nap_s: after so many seconds, or once all others have answered, that happens.
        """
        deadline = time.monotonic() + timeout_s
        for rank, order in orders.items():
            self._processes.send(rank, order)
        answers: dict[int, Any] = {}
        asleep: dict[int, float] = {}
        while waiting := [rank for rank in orders if rank not in answers]:
            answers |= self._processes.receive(waiting, _POLL_S)
            now = time.monotonic()
            pids = {rank: self._processes.pid(rank) for rank in waiting if rank not in answers}
            still = [rank for rank, pid in pids.items() if process_state(pid) == "T"]
            are_last = len(answers) + len(still) == len(orders)
            for rank in still:
                if are_last or now - asleep.setdefault(rank, now) >= nap_s:
                    os.kill(pids[rank], signal.SIGCONT)
                    deadline = now + timeout_s
            if now > deadline:
                raise self._stuck(list(pids), timeout_s)
        return answers

    def kill(self, *ranks: int) -> None:
        self._processes.end(*ranks)

    def _stuck(self, ranks: list[int], timeout_s: float) -> ViolationError:
        for rank in self._processes.ranks():
            os.kill(self._processes.pid(rank), signal.SIGUSR1)
        time.sleep(_TRACE_S)
        return ViolationError(f"a hang: ranks {ranks} have not answered within {timeout_s:g} s")
