"""Faults at awkward moments, over real ranks."""

from __future__ import annotations

import gc
import random
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.teardown import num_undestroyed_groups, open_sockets
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from tests.support.groups import group_of_size
from tests.support.processes import until
from tests.support.restarts import Wrappers, join_group, run_restartable

pytestmark = pytest.mark.multiprocess

SIZE = 4
LIMIT_S = 30.0
"""From a fault to the next attempt; nothing else ends a wait in that time."""

TOGETHER_S = 250.0
"""For dozens of faults; a quiet machine needs ten seconds."""

NUM_FAULTS = 30
SIZES = (1, 1000, 200_000, 2_000_000)
THREADS_OF_A_GROUP = 6
SOCKETS_OF_A_GROUP = 2
"""At most, of one in which gloo has forgotten a buffer: it goes after the group's timeout."""


def require_results(results: list[Any]) -> list[Any]:
    for result in results:
        assert not isinstance(result, Exception), (result, getattr(result, "__notes__", []))
    return results


def in_collectives_until(until: float, dice: random.Random, size: int) -> None:
    part = group_of_size(2)
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
    counts: list[Counted] = []

    @wrapper()
    def block(call: HPCallWrapper) -> int:
        attempt = call.num_attempts - 1
        if attempt:
            waits.append(time.monotonic() - ended[-1])
        counts.append(Counted.now())
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


@dataclass(frozen=True)
class Counted:
    """What a process has, and how much of it groups may have that wait for their end."""

    threads: int
    sockets: int
    of_old_groups: tuple[int, int]

    @classmethod
    def now(cls) -> Counted:
        num_groups = num_undestroyed_groups()
        at_most = (num_groups * THREADS_OF_A_GROUP, num_groups * SOCKETS_OF_A_GROUP)
        return cls(len(list(Path("/proc/self/task").iterdir())), len(open_sockets()), at_most)


def test_many_faults_in_collectives_are_survived_and_threads_and_sockets_do_not_grow() -> None:
    results = run_restartable(SIZE, many_faults, timeout_s=TOGETHER_S)

    for returned, waits, counts in require_results(results):
        assert returned == NUM_FAULTS
        assert max(waits) < LIMIT_S
        early, late = counts[5:15], counts[-10:]
        threads, sockets = min(c.threads for c in early), min(c.sockets for c in early)
        assert min(c.threads - c.of_old_groups[0] for c in late) <= threads + 2, counts
        assert min(c.sockets - c.of_old_groups[1] for c in late) <= sockets + 2, counts


def interrupted_in_turn(rank: int, wrapper: Wrappers) -> list[Any]:
    """Body of a rank: the user, or the script itself, ends the process."""
    found: list[Any] = []
    for how in ("ctrl-c", "0", "3"):

        @wrapper(how)
        def block(call: HPCallWrapper, how: str = how) -> None:
            if how == "ctrl-c":
                signal.raise_signal(signal.SIGINT)
            raise SystemExit(int(how))

        try:
            block()
        except (KeyboardInterrupt, SystemExit) as leaving:
            found.append(getattr(leaving, "code", type(leaving).__name__))
    return found


def test_who_ends_the_process_is_not_held_up() -> None:
    assert run_restartable(1, interrupted_in_turn) == [["KeyboardInterrupt", 0, 3]]


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


def test_of_an_attempt_its_frames_are_gone_and_its_groups_dead_and_destroyed_in_the_next() -> None:
    expected = [True, "WaitReleasedError"]
    assert run_restartable(2, kept_of_the_old_attempt) == [expected, expected]
