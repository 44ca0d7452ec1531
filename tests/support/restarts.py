"""Ranks that run a block again in place: real processes, a coordinator over a real store."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.inprocess.coordinator import RankInfo
from dist_ckpt_strategies.inprocess.store_coordinator import StoreCoordinator
from dist_ckpt_strategies.inprocess.wrap import HPWrapper
from tests.support.ranks import run_processes

HOST = "127.0.0.1"
GROUP_TIMEOUT_S = 100.0
"""Of process groups: no test may come near it."""


def run_restartable(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call ``body(rank, wrapper, *args)`` in processes; ``wrapper(...)`` is one of Wrappers."""
    host = host_store()
    try:
        return run_processes(
            size, _on_rank, size, host.port, body, args, timeout_s=timeout_s, makes_group=False
        )
    finally:
        del host


def join_group(backend: str = "interruptible_gloo", timeout_s: float = GROUP_TIMEOUT_S) -> None:
    """Make the default process group of this attempt, as a script under a launcher does."""
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def _on_rank(
    rank: int, size: int, port: int, body: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    os.environ |= {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        return body(rank, Wrappers(f"worker{rank}", RankInfo(rank, rank, size, size), port), *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Wrappers:
    """Makes HPWrappers of one rank, with limits that a test would see."""

    def __init__(self, worker: str, place: RankInfo, port: int) -> None:
        self.worker = worker
        self.place = place
        self.size = place.world_size
        self.port = port

    def __call__(self, successor: str = "", **settings: Any) -> HPWrapper:
        """For ``successor`` as for the process that takes the rank over."""

        def coordinator() -> StoreCoordinator:
            store = JobStore(HOST, self.port)
            return StoreCoordinator(store, self.worker + successor, self.place)

        return HPWrapper(
            **{
                "hp_api_factory": coordinator,
                "barrier_timeout_s": 100.0,
                "finish_timeout_s": 100.0,
                "abort_timeout": 60.0,
                "max_idle_attempts": None,
                **settings,
            }
        )
