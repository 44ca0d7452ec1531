"""An agent that speaks the six calls of docs/recovery_agent.md over a socket, and its client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCServer

_TICK_S = 0.01


class Agent(ThreadingMixIn, SimpleXMLRPCServer):
    """The agent of one job; a thread for each question, as each has a connection of its own."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, size: int, master: tuple[str, int] | tuple[()] = ()) -> None:
        super().__init__(("127.0.0.1", 0), allow_none=True, logRequests=False)
        self.size = size
        self.master = master
        self.calls: list[str] = []
        self.restart_round = 1
        self.faults: dict[int, dict[str, Any]] = {}
        self._arrived: dict[int, set[int]] = {}
        self._passed: dict[int, int] = {}
        self._opened: set[int] = set()
        self._changed = threading.Condition()
        answer: Any = self.answer
        self.register_function(answer, "answer")
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(_TICK_S,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, rank: int, call: str, args: Sequence[Any]) -> Any:
        with self._changed:
            self.calls.append(call)
            found = getattr(self, f"_{call}")(rank, *args)
            self._changed.notify_all()
            return found

    def _init(self, rank: int) -> None:
        assert 0 <= rank < self.size

    def _wait_rank_info(self, rank: int, timeout_s: float | None) -> dict[str, str]:
        place = {"RANK": rank, "LOCAL_RANK": rank, "JOB": 7}
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), self.size)
        master = dict(zip(("MASTER_ADDR", "MASTER_PORT"), self.master, strict=False))
        return {name: str(value) for name, value in (place | sizes | master).items()}

    def _barrier(self, rank: int, timeout_s: float) -> int | None:
        """Waits in whatever round is the forming one; a fault takes all who wait to the next."""
        if self.restart_round in self._opened:
            self.restart_round += 1

        def is_open() -> bool:
            if self._newest(rank) > self._passed.get(rank, 0):
                return True
            arrived = self._arrived.setdefault(self.restart_round, set())
            arrived.add(rank)
            if len(arrived) < self.size:
                return False
            self._opened.add(self.restart_round)
            self._changed.notify_all()
            return True

        if not self._changed.wait_for(is_open, timeout_s):
            return None
        self._passed[rank] = self._newest(rank)
        return self._passed[rank]

    def _newest(self, rank: int) -> int:
        """The last round that has begun with this rank."""
        return max((n for n in self._opened if rank in self._arrived[n]), default=0)

    def _past_barrier(self, rank: int, restart_round: int) -> None:
        assert restart_round in self._opened

    def _report_fault(
        self, rank: int, global_rank: int, restart_round: int, mode: str, why: str
    ) -> None:
        # Some may wait in the next barrier already: a round ends when all have come to that.
        if restart_round in self.faults or restart_round + 1 in self._opened:
            return
        self.faults[restart_round] = {"rank": global_rank, "mode": mode, "why": why}
        self.restart_round = max(self.restart_round, restart_round + 1)

    def _wait_fault(self, rank: int, restart_round: int, timeout_s: float) -> dict[str, Any] | None:
        self._changed.wait_for(lambda: restart_round in self.faults, timeout_s)
        return self.faults.get(restart_round)


class AgentSocketClient:
    """One rank's client of an Agent: what it is asked, it asks the agent."""

    def __init__(self, port: int, rank: int) -> None:
        self._port = port
        self._rank = rank

    def __getattr__(self, call: str) -> Callable[..., Any]:
        return partial(self.ask, call)

    def barrier(self, timeout_s: float) -> int:
        restart_round = self.ask("barrier", timeout_s)
        if restart_round is None:
            raise TimeoutError(f"not all ranks came in {timeout_s:g} s")
        return int(restart_round)

    def ask(self, call: str, *args: Any) -> Any:
        # A connection for each question: several threads of a rank ask at once.
        with ServerProxy(f"http://127.0.0.1:{self._port}", allow_none=True) as server:
            return server.answer(self._rank, call, args)
