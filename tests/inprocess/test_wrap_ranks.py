"""The restart loop over real ranks: a fault anywhere, and all run the block again.

A fault cuts the connections of process groups and stores, and no others.
"""

import gc
import queue
import random
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from dist_ckpt_strategies.comm.teardown import num_undestroyed_groups, open_sockets
from dist_ckpt_strategies.inprocess.abort import CheckpointlessAbortManager
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from tests.support.processes import until
from tests.support.ranks import allow_processes
from tests.support.restarts import HOST, Wrappers, join_group, run_restartable

pytestmark = pytest.mark.multiprocess

FAULTY = 2
SIZE = 4
LIMIT_S = 30.0
"""From a fault to the next attempt; nothing else ends a wait in that time."""

NUM_FAULTS = 30
SIZES = (1, 1000, 200_000, 2_000_000)
THREADS_OF_A_GROUP = 6
SOCKETS_OF_A_GROUP = 2
"""At most, of one in which gloo has forgotten a buffer: it goes after the group's timeout."""


class Echo:
    """A server of the rank and its client, on one epoll instance, as gloo's connections are."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._server = socket.create_server((HOST, 0))
        self._client = socket.create_connection(self._server.getsockname())
        self._served, _ = self._server.accept()
        for one in (self._server, self._client, self._served):
            self._epoll.register(one)

    def answer(self) -> bytes:
        self._served.sendall(b"ok")
        return self._client.recv(2)


def in_a_store_of_its_own() -> None:
    """The group cannot be made: no other rank comes."""
    own = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    client = TCPStore(HOST, own.port, is_master=False, timeout=timedelta(seconds=100))
    dist.destroy_process_group()
    dist.init_process_group("interruptible_gloo", store=client, rank=0, world_size=SIZE)


def in_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def in_a_loop() -> None:
    while True:
        pass


def in_a_data_loader() -> None:
    # As in a script of its own. Ranks of these tests would start a server first, and by that a
    # worker that the fault may find half begun, and that outlives the test.
    items: Any = range(1000)
    options: Any = {"num_workers": 1, "multiprocessing_context": "fork"}
    next(iter(torch.utils.data.DataLoader(items, collate_fn=lambda _: time.sleep(100), **options)))


def new_group() -> Any:
    return dist.new_group(list(range(SIZE)))


PLACES: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(1000)),
    "all_gather": lambda: dist.all_gather([torch.empty(9) for _ in range(SIZE)], torch.ones(9)),
    "barrier": dist.barrier,
    "recv": lambda: dist.recv(torch.ones(10), FAULTY),
    "objects": lambda: dist.all_gather_object([None] * SIZE, "x"),
    "new group": new_group,
    "a later group": lambda: dist.all_reduce(torch.ones(10), group=new_group()),
    "a store of its own": in_a_store_of_its_own,
    "the store": lambda: dist.distributed_c10d._get_default_store().get("never written"),
    "sleep": lambda: time.sleep(100),
    "a lock": in_a_lock,
    "a queue": lambda: queue.Queue[int]().get(),
    "a loop": in_a_loop,
    "a data loader": in_a_data_loader,
}


def one_fault_in_each_place(rank: int, wrapper: Wrappers, backend: str) -> list[Any]:
    """Body of a rank: in attempt ``i``, the faulty one raises while the others are in place i."""
    waits: list[float] = []
    causes: list[str] = []
    connections: list[Echo] = []
    attempts: Iterator[int] = iter(range(1000))
    names = list(PLACES)
    since = [0.0]

    @wrapper(abort=CheckpointlessAbortManager.get_default_checkpointless_abort())
    def block(call: HPCallWrapper | None = None) -> tuple[float, list[bytes]]:
        attempt = next(attempts)
        if attempt:
            waits.append(time.monotonic() - since[0])
            causes.append(call.last_fault.why if call else "")
        connections.append(Echo())
        answers = [one.answer() for one in connections]
        join_group(backend)
        dist.barrier()
        if attempt == len(PLACES):
            total = torch.tensor(float(rank))
            dist.all_reduce(total)
            return float(total), answers
        if rank == FAULTY:
            if names[attempt] == "a later group":
                new_group()
            time.sleep(0.05)
            since[0] = time.monotonic()
            raise ValueError(f"fault {attempt}")
        since[0] = time.monotonic() + 0.05
        PLACES[names[attempt]]()
        raise AssertionError("nothing has interrupted this")

    allow_processes()
    return [*block(), waits, causes]


@pytest.mark.parametrize("backend", ["gloo", "interruptible_gloo"])
def test_a_fault_ends_whatever_the_others_wait_for_and_cuts_no_other_connection(
    backend: str,
) -> None:
    results = run_restartable(SIZE, one_fault_in_each_place, backend)

    for total, answers, waits, causes in results:
        assert total == 6.0
        assert answers == [b"ok"] * (len(PLACES) + 1)
        assert causes == [f"ValueError: fault {attempt}" for attempt in range(len(PLACES))]
        assert max(waits) < LIMIT_S, dict(zip(PLACES, waits, strict=True))


def in_collectives_until(until: float, dice: random.Random, size: int) -> None:
    part = dist.new_subgroups(2)[0]
    data = torch.ones(size)
    many = [torch.empty_like(data) for _ in range(SIZE)]
    collectives: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(data),
        lambda: dist.all_gather(many, data),
        lambda: dist.broadcast(data, 0),
        lambda: dist.all_reduce(data, group=part),
        dist.barrier,
    ]
    while time.monotonic() < until:
        dice.choice(collectives)()


def many_faults(rank: int, wrapper: Wrappers) -> Any:
    """Body of a rank: in each attempt another one raises at a random moment."""
    ended: list[float] = []
    waits: list[float] = []
    counts: list[tuple[int, int, int]] = []

    @wrapper()
    def block(call: HPCallWrapper) -> int:
        attempt = call.num_attempts - 1
        if attempt:
            waits.append(time.monotonic() - ended[-1])
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        counts.append((num_threads, len(open_sockets()), num_undestroyed_groups()))
        dice = random.Random(attempt)
        faulty, delay_s, size = dice.randrange(SIZE), dice.random() * 0.1, dice.choice(SIZES)
        try:
            join_group()
            if attempt == NUM_FAULTS:
                return attempt
            until = time.monotonic() + (delay_s if rank == faulty else 100)
            in_collectives_until(until, dice, size)
            raise ValueError("random")
        finally:
            ended.append(time.monotonic())

    return block(), waits, counts


def test_many_faults_in_collectives_are_survived_and_threads_and_sockets_do_not_grow() -> None:
    results = run_restartable(SIZE, many_faults, timeout_s=250.0)

    for returned, waits, counts in results:
        assert returned == NUM_FAULTS
        assert max(waits) < LIMIT_S
        for one, of_a_group in enumerate((THREADS_OF_A_GROUP, SOCKETS_OF_A_GROUP)):
            early = min(count[one] for count in counts[5:15])
            late = min(count[one] - count[2] * of_a_group for count in counts[-10:])
            assert late <= early + 2, counts


def kept_of_the_old_attempt(rank: int, wrapper: Wrappers) -> Any:
    """Body of a rank: a tensor of the first attempt's frame, and a group that the block kept."""
    held: list[weakref.ref[torch.Tensor]] = []
    kept: list[Any] = []
    said: list[Any] = []

    @wrapper()
    def block(call: HPCallWrapper) -> None:
        join_group()
        if not kept:
            kept.append(dist.group.WORLD)
            tensor = torch.ones(10)
            held.append(weakref.ref(tensor))
            dist.barrier()  # or the fault may find the other rank without what it is to hold
            if rank == 0:
                raise ValueError("the frame has to go")
            dist.all_gather([torch.ones(10) for _ in range(2)], tensor)
        said.append(held[0]() is None)
        try:
            kept[0].allreduce([torch.ones(1)])
        except RuntimeError as error:
            said.append(type(error).__name__)
        dist.barrier()

    block()
    gc.collect()
    until(lambda: not num_undestroyed_groups())
    return said


def test_frames_and_groups_of_an_attempt_are_gone_in_the_next() -> None:
    expected = [True, "PeerLostError"]
    assert run_restartable(2, kept_of_the_old_attempt) == [expected, expected]
