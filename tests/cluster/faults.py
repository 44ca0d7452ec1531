"""Faults of a job on a cluster. Each is a generator: it yields where the job has to go on, and
repairs what it did when it is resumed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator

from tests.cluster.job import STORE, Job

Fault = Callable[[Job, random.Random], Iterator[None]]


Act = Callable[[Job, str], object]
"""Something that is done to a node."""


def signalled(number: int) -> Fault:
    """A worker gets a signal."""

    def fault(job: Job, draw: random.Random) -> Iterator[None]:
        job.signal(draw.randrange(job.shape.world_size), number)
        yield

    return fault


def broken(break_: Act, repair: Act, *, most: float = 0, is_spare: bool = False) -> Fault:
    """A node is broken, and repaired once the job goes on, or within some times to live."""

    def fault(job: Job, draw: random.Random) -> Iterator[None]:
        name = draw.choice(job.idle() if is_spare else job.busy())
        break_(job, name)
        if not most:
            yield
        time.sleep(draw.uniform(0, most) * job.shape.ttl_s)
        repair(job, name)
        if most:
            yield

    return fault


def kill(job: Job, name: str) -> None:
    job.cluster.kill(name)


def crash(job: Job, name: str) -> None:
    job.cluster.crash(name)


def unplug(job: Job, name: str) -> None:
    job.cluster.unplug(name)


def replug(job: Job, name: str) -> None:
    job.cluster.replug(name)


def freeze(job: Job, name: str) -> None:
    job.cluster.nodes[name].freeze()


def thaw(job: Job, name: str) -> None:
    job.cluster.nodes[name].thaw()


def one_cut_off(job: Job, draw: random.Random) -> Iterator[None]:
    """3|1: the store and the spare node are on the larger side."""
    yield from _cut_off(job, [draw.choice(job.busy())])


def two_cut_off(job: Job, draw: random.Random) -> Iterator[None]:
    """2|2: there is a spare node for one; both come back."""
    names = draw.sample(job.busy(), 2)
    parts = _cut_off(job, names)
    next(parts)
    time.sleep(1.5 * job.shape.ttl_s)
    next(parts, None)
    yield


def _cut_off(job: Job, names: list[str]) -> Iterator[None]:
    job.cluster.partition([name for name in job.cluster.nodes if name not in names], names)
    yield
    job.cluster.partition(list(job.cluster.nodes))


def clique_crashed(job: Job, draw: random.Random) -> Iterator[None]:
    """All nodes that hold one shard; they come up again, with what is on their disks."""
    workers, num_shards = job.workers(), job.shape.num_shards
    ranks = range(draw.randrange(num_shards), job.shape.world_size, num_shards)
    names = {workers[rank].node for rank in ranks}
    for name in names:
        job.cluster.crash(name)
    job.start(*names)
    yield


def lossy_link(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.busy())
    job.cluster.lossy(name, draw.uniform(0.02, 0.3))
    time.sleep(job.shape.ttl_s)
    yield
    job.cluster.mend(name)


def slow_link(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.busy())
    job.cluster.slow(name, f"{draw.randint(200, 2000)}kbit")
    time.sleep(job.shape.ttl_s)
    yield
    job.cluster.mend(name)


def store_broken(break_: Act, least: float, most: float) -> Fault:
    """All nodes leave the job, and begin another one at the store that comes up."""

    def fault(job: Job, draw: random.Random) -> Iterator[None]:
        break_(job, STORE)
        time.sleep(draw.uniform(least, most) * job.shape.ttl_s)
        job.start(STORE)
        yield

    return fault


ALL: dict[str, Fault] = {
    "exception": signalled(signal.SIGUSR1),
    "worker_killed": signalled(signal.SIGKILL),
    "worker_stopped": signalled(signal.SIGSTOP),
    "agent_killed": broken(Job.kill_agent, Job.start),
    "node_killed": broken(kill, Job.start),
    "node_crashed": broken(crash, Job.start),
    "spare_node_crashed": broken(crash, Job.start, is_spare=True),
    "unplugged": broken(unplug, replug),
    "unplugged_for_a_moment": broken(unplug, replug, most=1),
    "frozen": broken(freeze, thaw),
    "frozen_for_a_moment": broken(freeze, thaw, most=1.5),
    "one_cut_off": one_cut_off,
    "two_cut_off": two_cut_off,
    "clique_crashed": clique_crashed,
    "lossy_link": lossy_link,
    "slow_link": slow_link,
    "store_crashed": store_broken(crash, 1, 2),
    "store_killed": store_broken(Job.kill_agent, 0.5, 1.5),  # connections are closed
}


def happen(job: Job, fault: Fault, draw: random.Random) -> float:
    """A fault, and its repair once all ranks do steps again; seconds until they did.

    Raises:
        AssertionError: a state is wrong, or two processes were one rank.
        TimeoutError: the job hangs.
    """
    since = time.monotonic()
    steps = fault(job, draw)
    next(steps)
    seconds = time.monotonic() - since
    seconds += job.go_on(since + seconds)
    next(steps, None)
    job.await_spares()
    job.require_right()
    return seconds
