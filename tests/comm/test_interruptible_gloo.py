"""The backend interruptible_gloo: gloo's results, and waits that can be ended."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.interruptible_gloo import (
    BACKEND_NAME,
    InterruptibleGloo,
    register_interruptible_gloo,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from tests.local.clique_worlds import described
from tests.support.entries import outcome
from tests.support.processes import run_script
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

SIZE = 4
Group = Any


def ours() -> Group:
    """A group of all ranks over the backend. Collective: world."""
    register_interruptible_gloo()
    register_interruptible_gloo()
    return dist.new_group(backend=BACKEND_NAME, timeout=timedelta(seconds=100))


def mine(numel: int = 8) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * dist.get_rank()


def collectives(group: Group) -> Any:
    """What each of them fills or changes."""
    rank, sizes = dist.get_rank(), range(1, SIZE + 1)
    most, sent, reduced, uneven = mine(), mine(), mine(), torch.zeros(SIZE * (rank + 1))
    lists = [[torch.zeros(8) for _ in range(SIZE)] for _ in range(2)]
    objects = [None] * SIZE
    whole, scattered, summed, part = map(torch.zeros, (8 * SIZE, 8, 8, 2))
    parts = [mine() + i for i in range(SIZE)]
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.broadcast(sent, 2, group=group)
    dist.all_gather(lists[0], mine(), group=group)
    dist.all_gather_into_tensor(whole, mine(), group=group)
    dist.all_gather_object(objects, str(rank), group=group)
    dist.gather(mine(), None if rank else lists[1], 0, group=group)
    dist.scatter(scattered, parts if rank == 1 else None, 1, group=group)
    dist.reduce_scatter(summed, parts, group=group)
    dist.reduce_scatter_tensor(part, mine(), group=group)
    dist.all_to_all_single(uneven, mine(sum(sizes)), [rank + 1] * SIZE, [*sizes], group=group)
    dist.reduce(reduced, 1, group=group)
    work: Any = dist.all_reduce(mine(), group=group, async_op=True)
    found = [most, sent, *lists, whole, objects, scattered, summed, part, uneven]
    return [*found, reduced if rank == 1 else None, work.get_future().wait()]


def from_anybody(group: Group) -> Any:
    if dist.get_rank() == 0:
        data = torch.zeros(8)
        return sorted(dist.recv(data, group=group) for _ in range(SIZE - 1))
    dist.send(mine(), 0, group=group)
    return None


def around_and_in_pairs(group: Group) -> Any:
    rank = dist.get_rank()
    data, batched = torch.zeros(8), torch.zeros(8)
    works = [dist.isend(mine(), (rank + 1) % SIZE, group=group)]
    works.append(dist.irecv(data, (rank - 1) % SIZE, group=group))
    operations = [
        dist.P2POp(dist.isend, mine(), rank ^ 1, group=group),
        dist.P2POp(dist.irecv, batched, rank ^ 1, group=group),
    ]
    for work in [*works, *dist.batch_isend_irecv(operations)]:
        assert work is not None
        work.wait()
    return data, batched


def coalesced(group: Group) -> Any:
    data = [mine(), mine(3)]
    with dist.distributed_c10d._coalescing_manager(group=group, async_ops=False):
        for one in data:
            dist.all_reduce(one, group=group)
    return data


def functional(group: Group) -> Any:
    summed = torch.ops._c10d_functional.all_reduce(mine(), "sum", group.group_name)
    return torch.ops._c10d_functional.wait_tensor(summed)


def ddp(group: Group) -> Any:
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), process_group=group
    )
    for _ in range(2):
        model(mine()).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def our_messages(group: Group) -> Any:
    comm = open_communicator(group, timeout_s=60, purpose="a test")
    return comm.all_gather({"rank": comm.rank}), str(comm)[:1]


CALLS: list[Callable[[Group], Any]] = [
    collectives, from_anybody, around_and_in_pairs, coalesced, functional, ddp, our_messages,
]  # fmt: skip


def compare_with_gloo(rank: int) -> list[str]:
    """Body of a rank: the calls whose results are not gloo's."""
    group, gloo = ours(), dist.new_group()
    found = [c.__name__ for c in CALLS if described(c(group)) != described(c(gloo))]
    assert averaged(rank) == [2, 4, 2.5, 5]
    return found


def averaged(rank: int) -> list[float]:
    """Of whole numbers, which are rounded down, and of others."""
    counts, values = torch.tensor([rank + 1, 4]), torch.tensor([rank + 1.0])
    for tensor in (counts, values):
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG, group=ours())
    others = torch.tensor([rank + 4])
    work: Any = dist.all_reduce(others, op=dist.ReduceOp.AVG, group=ours(), async_op=True)
    (found,) = work.get_future().wait()
    work.wait()
    assert torch.equal(found, others)
    return [*counts.tolist(), *values.tolist(), *others.tolist()]


def test_every_call_gives_what_gloo_gives() -> None:
    assert run_processes(SIZE, compare_with_gloo) == [[]] * SIZE


WAITS: list[Callable[[Group], Any]] = [
    lambda group: dist.all_reduce(torch.ones(10), group=group),
    lambda group: dist.recv(torch.ones(10), 0, group=group),
    lambda group: dist.recv(torch.ones(10), group=group),
    lambda group: dist.barrier(group=group),
    lambda group: dist.all_gather_object([None] * 2, 1, group=group),
    lambda group: dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait(),
]


def released(rank: int) -> list[Any]:
    """Body of a rank: the first stays away; each wait of the other is aborted."""
    found: list[Any] = []
    for wait in [*WAITS, None]:
        group = ours()
        model: Any = torch.nn.Linear(4, 1)
        if wait is None:  # and rank 0 takes no part in the gradients
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        if rank:
            backward = model(torch.ones(2, 4)).sum().backward
            threading.Timer(0.1, InterruptibleGloo.abort_all).start()
            found.append(outcome(partial(wait, group) if wait else backward))
            InterruptibleGloo.allow_new()
        dist.barrier()
    comm = open_communicator(ours(), timeout_s=0.5, purpose="a test")
    found.append(outcome(lambda: rank or comm.all_gather(1)))
    dist.barrier()
    return found


def test_a_wait_ends_when_it_is_ended_or_at_its_limit() -> None:
    """A future, and a pass over gradients, give the text of the error only."""
    (late,), (*found, _) = run_processes(2, released)

    for number, failure in enumerate(found):
        assert "stopped waiting for its peers" in failure.text
        assert ("PeerLostError" in failure.kinds) == (number < len(WAITS) - 1)
        assert failure.seconds < 50
    assert "PeerTimeoutError" in late.kinds, late
    assert late.global_rank == 1
    assert 0.4 < late.seconds < 50


EXITS = """
import os
from contextlib import suppress
import torch, torch.distributed as dist
import dist_ckpt_strategies.comm.teardown
from dist_ckpt_strategies.comm.interruptible_gloo import register_interruptible_gloo

def main():
    dist.init_process_group("interruptible_gloo", store=dist.HashStore(), rank=0, world_size=1)
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # it has ended
            if "pt_gloo" in open(f"/proc/self/task/{task}/comm").read():
                os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    dist.all_reduce(torch.ones(1))

torch.set_num_threads(1)
register_interruptible_gloo()
main()
"""


def test_a_process_ends_well_though_a_thread_of_gloo_is_held_up(tmp_path: Path) -> None:
    script = tmp_path / "exits.py"
    script.write_text(EXITS)
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
    try:
        for _ in range(2):
            done = run_script(script)
            assert done.returncode == 0, done.stderr
    finally:
        for process in busy:
            process.kill()
            process.wait()
