"""Ranks that run a block again in place: real processes, a coordinator over a real store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dist_ckpt_strategies.comm.key_values import TcpHost, TcpKeyValues
from dist_ckpt_strategies.inprocess.coordinator import RankInfo
from dist_ckpt_strategies.inprocess.store_coordinator import StoreCoordinator
from dist_ckpt_strategies.inprocess.wrap import HPWrapper
from tests.support.ranks import run_processes

HOST = "127.0.0.1"
GROUP_TIMEOUT_S = 30.0
"""Of process groups: no test may come near it."""


def run_restartable(
    size: int, body: Callable[..., Any], *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Call ``body(rank, wrapper, *args)`` in processes; ``wrapper(...)`` is an HPWrapper."""
    host = TcpHost()
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
    store = TcpKeyValues(HOST, port, prefix="coordinator")
    coordinator = StoreCoordinator(store, f"worker{rank}", RankInfo(rank, rank, size, size))

    def wrapper(**settings: Any) -> HPWrapper:
        return HPWrapper(
            **{
                "coordinator": coordinator,
                "barrier_timeout_s": 30.0,
                "finish_timeout_s": 30.0,
                "abort_timeout": 10.0,
                **settings,
            }
        )

    try:
        return body(rank, wrapper, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        coordinator.close()


class Stopwatch:
    """When things happened in this process, in seconds since it was made."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.times: list[float] = []

    def note(self) -> None:
        self.times.append(time.monotonic() - self._begun)
