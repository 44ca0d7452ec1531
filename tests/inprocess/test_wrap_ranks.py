"""The restart loop over real ranks: a fault anywhere, and all run the block again."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.inprocess.abort import CheckpointlessAbortManager
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from tests.support.ranks import allow_processes
from tests.support.restarts import Wrappers, join_group, run_restartable

pytestmark = pytest.mark.multiprocess

FAULTY = 2
SIZE = 4
LIMIT_S = 30.0
"""From the fault to the next attempt; nothing else ends a wait in that time."""


class _Slow(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(100)
        return torch.zeros(1)


def in_all_reduce() -> None:
    dist.all_reduce(torch.ones(1000))


def in_all_gather() -> None:
    dist.all_gather([torch.empty(10) for _ in range(SIZE)], torch.ones(10))


def in_barrier() -> None:
    dist.barrier()


def in_recv() -> None:
    dist.recv(torch.ones(10), FAULTY)


def in_objects() -> None:
    dist.all_gather_object([None] * SIZE, "x")


def in_new_group() -> None:
    dist.new_group(list(range(SIZE)))


def in_sleep() -> None:
    time.sleep(100)


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def in_a_queue() -> None:
    queue.Queue[int]().get()


def in_a_loop() -> None:
    while True:
        pass


def in_a_data_loader() -> None:
    # As in a script of its own. Ranks of these tests would start a server first, and by that a
    # worker that the fault may find half begun, and that outlives the test.
    loader = torch.utils.data.DataLoader(_Slow(), num_workers=1, multiprocessing_context="fork")
    next(iter(loader))


PLACES: list[Callable[[], None]] = [
    in_all_reduce,
    in_all_gather,
    in_barrier,
    in_recv,
    in_objects,
    in_new_group,
    in_sleep,
    in_a_lock,
    in_a_queue,
    in_a_loop,
    in_a_data_loader,
]


def one_fault_in_each_place(rank: int, wrapper: Wrappers) -> list[Any]:
    """Body of a rank: in attempt ``i``, the faulty one raises while the others are in place i."""
    waits: list[float] = []
    causes: list[str] = []
    attempts: Iterator[int] = iter(range(1000))
    since = [0.0]

    @wrapper(abort=CheckpointlessAbortManager.get_default_checkpointless_abort())
    def block(call: HPCallWrapper | None = None) -> float:
        attempt = next(attempts)
        if attempt:
            waits.append(time.monotonic() - since[0])
            causes.append(call.last_fault.why if call else "")
        join_group()
        dist.barrier()
        if attempt == len(PLACES):
            total = torch.tensor(float(rank))
            dist.all_reduce(total)
            return float(total)
        if rank == FAULTY:
            time.sleep(0.05)
            since[0] = time.monotonic()
            raise ValueError(f"fault {attempt}")
        since[0] = time.monotonic() + 0.05
        PLACES[attempt]()
        raise AssertionError("nobody has interrupted this")

    allow_processes()
    return [block(), waits, causes]


def test_a_fault_ends_whatever_the_others_wait_for() -> None:
    results = run_restartable(SIZE, one_fault_in_each_place)

    for result in results:
        assert not isinstance(result, Exception), (result, result.__notes__)
        total, waits, causes = result
        assert total == 6.0
        assert causes == [f"ValueError: fault {attempt}" for attempt in range(len(PLACES))]
        assert max(waits) < LIMIT_S, dict(zip(PLACES, waits, strict=True))
