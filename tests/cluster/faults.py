"""Faults of a job on a cluster. Each is a generator: it yields where the job has to go on, and
repairs what it did when it is resumed."""

import random
import signal
import time
from collections.abc import Callable, Iterator

from tests.cluster.job import STORE, TTL_S, Job
from tests.cluster.namespaces import Cluster

Fault = Callable[[Job, random.Random], Iterator[None]]
Act = Callable[[Job, str], object]
"""Something that is done to a node."""


def to_node(act: Callable[[Cluster, str], object]) -> Act:
    return lambda job, name: act(job.cluster, name)


CRASH, UNPLUG, REPLUG = map(to_node, (Cluster.crash, Cluster.unplug, Cluster.replug))
FREEZE, THAW = map(to_node, (Cluster.freeze, Cluster.thaw))


def signalled(number: int) -> Fault:
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
        time.sleep(draw.uniform(0, most) * TTL_S)
        repair(job, name)
        if most:
            yield

    return fault


def cut_off(number: int) -> Fault:
    """Nodes lose the others and the store.

    A single node finds its place taken later; one of two is replaced by a spare node, and both
    come back.
    """

    def fault(job: Job, draw: random.Random) -> Iterator[None]:
        names = draw.sample(job.busy(), number)
        job.cluster.partition([name for name in job.cluster.nodes if name not in names], names)
        if number == 1:
            yield
        else:
            time.sleep(1.5 * TTL_S)
        job.cluster.partition(list(job.cluster.nodes))
        if number > 1:
            yield

    return fault


def clique_crashed(job: Job, draw: random.Random) -> Iterator[None]:
    """All nodes that hold one shard; they come up again, with what is on their disks."""
    workers, num_shards = job.workers(), job.shape.num_shards
    ranks = range(draw.randrange(num_shards), job.shape.world_size, num_shards)
    names = {workers[rank].node for rank in ranks}
    for name in names:
        job.cluster.crash(name)
    job.start(*names)
    yield


def bad_link(*, is_lossy: bool) -> Fault:
    def fault(job: Job, draw: random.Random) -> Iterator[None]:
        name = draw.choice(job.busy())
        if is_lossy:
            job.cluster.lossy(name, draw.uniform(0.02, 0.3))
        else:
            job.cluster.slow(name, f"{draw.randint(200, 2000)}kbit")
        time.sleep(TTL_S)
        yield
        job.cluster.mend(name)

    return fault


def store_broken(break_: Act, least: float, most: float) -> Fault:
    """All nodes leave the job, and begin another one at the store that comes up."""

    def fault(job: Job, draw: random.Random) -> Iterator[None]:
        break_(job, STORE)
        time.sleep(draw.uniform(least, most) * TTL_S)
        job.start(STORE)
        yield

    return fault


ALL: dict[str, Fault] = {
    "exception": signalled(signal.SIGUSR1),
    "worker_killed": signalled(signal.SIGKILL),
    "worker_stopped": signalled(signal.SIGSTOP),
    "agent_killed": broken(Job.kill_agent, Job.start),
    "node_killed": broken(to_node(Cluster.kill), Job.start),
    "node_crashed": broken(CRASH, Job.start),
    "spare_node_crashed": broken(CRASH, Job.start, is_spare=True),
    "unplugged": broken(UNPLUG, REPLUG),
    "unplugged_for_a_moment": broken(UNPLUG, REPLUG, most=1),
    "frozen": broken(FREEZE, THAW),
    "frozen_for_a_moment": broken(FREEZE, THAW, most=1.5),
    "one_cut_off": cut_off(1),
    "two_cut_off": cut_off(2),
    "clique_crashed": clique_crashed,
    "lossy_link": bad_link(is_lossy=True),
    "slow_link": bad_link(is_lossy=False),
    "store_crashed": store_broken(CRASH, 1, 2),
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
