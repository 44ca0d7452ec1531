"""Faults of a job on a cluster. Each is a generator: it yields where the job has to go on, and
repairs what it did when it is resumed."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator

from tests.cluster.job import STORE, Job

Fault = Callable[[Job, random.Random], Iterator[None]]


def exception(job: Job, draw: random.Random) -> Iterator[None]:
    job.signal(draw.randrange(job.shape.world_size), signal.SIGUSR1)
    yield


def worker_killed(job: Job, draw: random.Random) -> Iterator[None]:
    job.signal(draw.randrange(job.shape.world_size), signal.SIGKILL)
    yield


def worker_stopped(job: Job, draw: random.Random) -> Iterator[None]:
    job.signal(draw.randrange(job.shape.world_size), signal.SIGSTOP)
    yield


def agent_killed(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.busy())
    job.kill_agent(name)
    yield
    job.start(name)


def node_killed(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.busy())
    job.cluster.kill(name)
    yield
    job.start(name)


def node_crashed(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.busy())
    job.cluster.crash(name)
    yield
    job.start(name)


def spare_node_crashed(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.idle())
    job.cluster.crash(name)
    yield
    job.start(name)


def unplugged(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.busy())
    job.cluster.unplug(name)
    yield
    job.cluster.replug(name)


def unplugged_for_a_moment(job: Job, draw: random.Random) -> Iterator[None]:
    name = draw.choice(job.busy())
    job.cluster.unplug(name)
    time.sleep(draw.uniform(0, job.shape.ttl_s))
    job.cluster.replug(name)
    yield


def frozen(job: Job, draw: random.Random) -> Iterator[None]:
    node = job.cluster.nodes[draw.choice(job.busy())]
    node.freeze()
    yield
    node.thaw()


def frozen_for_a_moment(job: Job, draw: random.Random) -> Iterator[None]:
    node = job.cluster.nodes[draw.choice(job.busy())]
    node.freeze()
    time.sleep(draw.uniform(0, 1.5 * job.shape.ttl_s))
    node.thaw()
    yield


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


def store_crashed(job: Job, draw: random.Random) -> Iterator[None]:
    """All nodes leave the job, and begin another one at the store that comes up."""
    job.cluster.crash(STORE)
    time.sleep(draw.uniform(1, 2) * job.shape.ttl_s)
    job.start(STORE)
    yield


def store_killed(job: Job, draw: random.Random) -> Iterator[None]:
    """The same, but the connections are closed."""
    job.kill_agent(STORE)
    time.sleep(draw.uniform(0.5, 1.5) * job.shape.ttl_s)
    job.start(STORE)
    yield


ALL: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        exception,
        worker_killed,
        worker_stopped,
        agent_killed,
        node_killed,
        node_crashed,
        spare_node_crashed,
        unplugged,
        unplugged_for_a_moment,
        frozen,
        frozen_for_a_moment,
        one_cut_off,
        two_cut_off,
        clique_crashed,
        lossy_link,
        slow_link,
        store_crashed,
        store_killed,
    )
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
