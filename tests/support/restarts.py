"""Ranks that run a block again in place: real processes, a rendezvous over a real store."""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode, RankInfo
from dist_ckpt_strategies.inprocess.store_rendezvous import RestartState, StoreRendezvous
from dist_ckpt_strategies.inprocess.wrap import HPWrapper
from tests.support.ranks import done_by, run_processes

HOST = "127.0.0.1"
GROUP_TIMEOUT_S = 100.0  # of process groups: no test may come near it
_MAX_DEATHS = 8


def run_restartable(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """What ``body(rank, wrapper, *args)`` returns in processes; ``wrapper`` is one of Wrappers."""
    host = host_store()
    task = (size, host.port, body, args)
    return done_by(size, _on_rank, task, timeout_s=timeout_s, makes_group=False)


def run_respawned(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> tuple[list[Any], list[int]]:
    """The same where a process that dies is begun anew; also the ranks that have died."""
    host = host_store()
    state = RestartState(JobStore(HOST, host.port))
    died: list[int] = []

    def on_death(rank: int) -> None:
        """As the elastic agent: first the end of what it had joined, then the new process."""
        died.append(rank)
        joined = state.joined(f"worker{rank}.{died.count(rank)}")
        assert len(died) <= _MAX_DEATHS, died
        if joined is not None:
            state.end(Fault(rank, joined, FaultMode.DEATH, "the process is gone"))

    task = (size, host.port, body, args)
    results = run_processes(
        size, _on_rank, task, timeout_s=timeout_s, makes_group=False, on_death=on_death
    )
    return results, died


def join_group(backend: str = "interruptible_gloo", timeout_s: float = GROUP_TIMEOUT_S) -> None:
    """Make the default process group of this attempt, as a script under a launcher does."""
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def _on_rank(rank: int, task: tuple[Any, ...]) -> Any:
    size, port, body, args = task
    os.environ |= {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    life = JobStore(HOST, port).add(f"test/lives/{rank}")
    wrappers = Wrappers(f"worker{rank}.{life}", RankInfo(rank, rank, size, size), port)
    try:
        return body(rank, wrappers, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Wrappers:
    """Makes HPWrappers of one rank, with limits that a test would see."""

    def __init__(self, worker: str, place: RankInfo, port: int) -> None:
        self.worker = worker
        self.place = place
        self.port = port

    def __call__(self, **settings: Any) -> HPWrapper:
        return HPWrapper(**self.settings() | settings)

    def settings(self) -> dict[str, Any]:
        """What HPWrapper is given."""

        def client() -> StoreRendezvous:
            store = JobStore(HOST, self.port)
            return StoreRendezvous(store, self.worker, self.place)

        return {
            "hp_api_factory": client,
            "barrier_timeout_s": 100.0,
            "finish_timeout_s": 100.0,
            "abort_timeout": 60.0,
            "max_idle_attempts": None,
        }
