"""Ranks that are replaced when they die, as under the launcher, but forked from a warmed parent.

Megatron-Core takes seven seconds to import; ``dist-ckpt run`` starts every worker afresh.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.inprocess.coordinator import Fault, FaultMode, RankInfo
from dist_ckpt_strategies.inprocess.store_coordinator import RestartState
from tests.support.ranks import run_processes
from tests.support.restarts import HOST, Wrappers

_MAX_DEATHS = 8


def run_respawned(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> tuple[list[Any], list[int]]:
    """Call ``body(rank, wrappers, *args)`` in processes; one that dies is begun anew.

    Returns:
        What each rank returned, an exception where it raised; and the ranks that have died.

    Raises:
        TimeoutError: some rank had no result in time. None is left running, however this ends.
    """
    host = host_store()
    state = RestartState(JobStore(HOST, host.port))
    died: list[int] = []

    def on_death(rank: int) -> None:
        """As the supervisor: first the end of what it had joined, then the new process."""
        died.append(rank)
        joined = state.joined(f"worker{rank}.{died.count(rank)}")
        assert len(died) <= _MAX_DEATHS, died
        if joined is not None:
            state.end(Fault(rank, joined, FaultMode.DEATH, "the process is gone"))

    task = (size, host.port, body, args)
    results = run_processes(
        size, _on_rank, task, timeout_s=timeout_s, makes_group=False, on_death=on_death
    )
    del host
    return results, died


def _on_rank(rank: int, task: tuple[Any, ...]) -> Any:
    size, port, body, args = task
    os.environ |= {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    life = JobStore(HOST, port).add(f"test/lives/{rank}")
    wrappers = Wrappers(f"worker{rank}.{life}", RankInfo(rank, rank, size, size), port)
    return body(rank, wrappers, *args)
