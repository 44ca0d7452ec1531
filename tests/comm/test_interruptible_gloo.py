"""The backend interruptible_gloo: gloo's results, and waits that end when told to."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch._C._distributed_c10d import PrefixStore

from dist_ckpt_strategies.comm.interruptible_gloo import (
    BACKEND_NAME,
    InterruptibleGloo,
    register_interruptible_gloo,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import PeerTimeoutError, WaitReleasedError
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


def empty(numel: int = 8) -> torch.Tensor:
    return torch.zeros(numel)


def many() -> list[torch.Tensor]:
    return [empty() for _ in range(SIZE)]


def parts() -> list[torch.Tensor]:
    return [mine() + i for i in range(SIZE)]


def only_on(rank: int, made: Callable[[], Any]) -> Any:
    return made() if dist.get_rank() == rank else None


FILLED: list[tuple[Callable[[], Any], Callable[[Any, Group], Any]]] = [
    (mine, lambda data, group: dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)),
    (mine, lambda data, group: dist.broadcast(data, 2, group=group)),
    (many, lambda into, group: dist.all_gather(into, mine(), group=group)),
    (
        lambda: empty(8 * SIZE),
        lambda into, group: dist.all_gather_into_tensor(into, mine(), group=group),
    ),
    (
        lambda: [None] * SIZE,
        lambda into, group: dist.all_gather_object(into, str(dist.get_rank()), group=group),
    ),
    (lambda: only_on(0, many), lambda into, group: dist.gather(mine(), into, 0, group=group)),
    (empty, lambda into, group: dist.scatter(into, only_on(1, parts), 1, group=group)),
    (empty, lambda into, group: dist.reduce_scatter(into, parts(), group=group)),
    (lambda: empty(2), lambda into, group: dist.reduce_scatter_tensor(into, mine(), group=group)),
    (empty, lambda into, group: dist.all_to_all_single(into, mine(), group=group)),
]
"""What a rank has before a call, and the call that fills or changes it."""


def filled(group: Group) -> Any:
    found = []
    for made, call in FILLED:
        into = made()
        call(into, group)
        found.append(into)
    return found


def all_reduce_future(group: Group) -> Any:
    work = dist.all_reduce(mine(), group=group, async_op=True)
    return work.get_future().wait()


def reduce(group: Group) -> Any:
    data = mine()
    dist.reduce(data, 1, group=group)
    return data if dist.get_rank() == 1 else None


def all_to_all_uneven(group: Group) -> Any:
    rank = dist.get_rank()
    data = empty(SIZE * (rank + 1))
    sizes = [i + 1 for i in range(SIZE)]
    dist.all_to_all_single(data, mine(sum(sizes)), [rank + 1] * SIZE, sizes, group=group)
    return data


def ring(group: Group) -> Any:
    rank = dist.get_rank()
    data = empty()
    sent = dist.isend(mine(), (rank + 1) % SIZE, group=group)
    received = dist.irecv(data, (rank - 1) % SIZE, group=group)
    assert sent is not None
    assert received is not None
    received.wait()
    sent.wait()
    return data


def from_anybody(group: Group) -> Any:
    if dist.get_rank() == 0:
        data = empty()
        return sorted(dist.recv(data, group=group) for _ in range(SIZE - 1))
    dist.send(mine(), 0, group=group)
    return None


def batched(group: Group) -> Any:
    peer = dist.get_rank() ^ 1
    data = empty()
    operations = [
        dist.P2POp(dist.isend, mine(), peer, group=group),
        dist.P2POp(dist.irecv, data, peer, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return data


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
    filled, all_reduce_future, reduce, all_to_all_uneven, ring, from_anybody, batched, coalesced,
    functional, ddp, our_messages,
]  # fmt: skip


def compare_with_gloo(rank: int) -> list[str]:
    """Body of a rank: the calls whose results are not gloo's."""
    group, gloo = ours(), dist.new_group()
    found = [call.__name__ for call in CALLS if not is_equal(call(group), call(gloo))]
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


def is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_equal, a, b))
    return bool(a == b)


def test_every_call_gives_what_gloo_gives() -> None:
    assert run_processes(SIZE, compare_with_gloo) == [[]] * SIZE


def waits() -> list[Callable[[Group], Any]]:
    return [
        lambda group: dist.all_reduce(torch.ones(10), group=group),
        lambda group: dist.recv(torch.ones(10), 0, group=group),
        lambda group: dist.recv(torch.ones(10), group=group),
        lambda group: dist.barrier(group=group),
        lambda group: (
            dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future().wait()
        ),
        lambda group: dist.all_gather_object([None] * 2, 1, group=group),
    ]


def backward_without_a_peer(group: Group) -> None:
    """The other rank takes no part in the gradients."""
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1), process_group=group)
    module(torch.ones(2, 4)).sum().backward()


def released(rank: int) -> list[Any]:
    """Body of a rank: the first stays away; each wait of the other is aborted."""
    found: list[Any] = []
    for wait in [*waits(), backward_without_a_peer]:
        group = ours()
        if rank == 0:
            if wait is backward_without_a_peer:  # it is made together
                torch.nn.parallel.DistributedDataParallel(
                    torch.nn.Linear(4, 1), process_group=group
                )
            dist.barrier()
            continue
        threading.Timer(0.1, InterruptibleGloo.abort_all).start()
        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="stopped waiting for its peers") as caught:
            wait(group)
        assert time.monotonic() - begun < 50
        found.append(isinstance(caught.value, WaitReleasedError))
        InterruptibleGloo.allow_new()
        dist.barrier()
    return found


def test_a_wait_ends_when_it_is_told_to() -> None:
    """A future, and a pass over gradients, give the text of the error only."""
    _, found = run_processes(2, released)

    assert found[:-1] == [True, True, True, True, False, True]


def limited(rank: int) -> Any:
    """Body of a rank: limits of time are kept, and named as everywhere in the package."""
    comm = open_communicator(ours(), timeout_s=0.5, purpose="a test")
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            comm.all_gather(1)
        assert caught.value.rank == 1
        assert 0.4 < time.monotonic() - begun < 50
    dist.barrier()


def test_a_limit_of_time_is_kept() -> None:
    assert run_processes(2, limited) == [None, None]


def megatrons_layout(rank: int) -> Any:
    """Body of a rank: sums over Megatron-Core's groups."""
    register_interruptible_gloo()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    prefixed = PrefixStore("ours", store)
    dist.init_process_group(BACKEND_NAME, store=prefixed, rank=rank, world_size=SIZE)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=2, create_gloo_process_groups=True
    )
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    parallel_state.destroy_model_parallel()
    return float(total)


def test_megatrons_parallel_layout_works_over_it() -> None:
    assert run_processes(SIZE, megatrons_layout) == [6.0] * SIZE


EXITS = """
import os, sys
import torch, torch.distributed as dist
import dist_ckpt_strategies.comm.teardown
from dist_ckpt_strategies.comm.interruptible_gloo import register_interruptible_gloo

torch.set_num_threads(1)
register_interruptible_gloo()
for _ in range(8):
    if (pid := os.fork()) == 0:
        break
    assert os.waitpid(pid, 0)[1] == 0
else:
    os._exit(0)

def main():
    dist.init_process_group("interruptible_gloo", store=dist.HashStore(), rank=0, world_size=1)
    for task in os.listdir("/proc/self/task"):
        if "pt_gloo" in open(f"/proc/self/task/{task}/comm").read():
            os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
    dist.all_reduce(torch.ones(1))

main()
"""


def test_a_process_ends_well_though_a_thread_of_gloo_is_held_up(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(EXITS)
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        done = subprocess.run(
            [sys.executable, tmp_path / "exits.py"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr
