"""Jobs of several nodes: they go on bit for bit, or end on all nodes and say why.

``python -m tests.faults`` has more faults, at random.
"""

import random
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import faults
from tests.cluster.job import FENCED, STORE, TTL_S, Job, Shape, started
from tests.cluster.namespaces import Cluster, why_not

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]

NODE_MISSING = 87
SMALL = Shape(num_ranks=1, num_spares=0, num_spare_nodes=0, num_shards=1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, [STORE, "a", "b", "c"]) as found:
        yield found


def test_a_job_continues_after_each_fault_as_if_there_had_been_none(cluster: Cluster) -> None:
    job = started(cluster, Shape(), "a", "b", "c")
    job.await_spares()

    for name in ("node_crashed", "frozen"):
        faults.happen(job, faults.ALL[name], random.Random(1))

    assert job.finish() == dict.fromkeys((STORE, "a", "b", "c"), 0), job.report()
    job.require_right()
    assert {note.what for note in job.read()} == {"begin", "memory", "step"}


def test_a_lost_place_waits_for_a_spare_node_and_without_one_the_job_ends(cluster: Cluster) -> None:
    job = started(cluster, replace(SMALL, num_spare_nodes=1, wait_s=30), "a", "b")
    since = time.monotonic()

    cluster.crash("b")
    job.start("c")  # it comes late

    job.go_on(since)
    assert job.busy() == ["a", "c"]
    assert len({note.process for note in job.read()}) == 3  # that of node a stays
    job.require_right()
    cluster.crash("c")
    assert job.codes() == {STORE: NODE_MISSING, "a": NODE_MISSING}, job.report()
    for name in (STORE, "a"):
        assert re.search(r"node c:\d+ no longer renews its place", job.log(name))


def test_a_node_ends_on_a_signal_and_when_the_store_is_silent(cluster: Cluster) -> None:
    job = started(cluster, SMALL, "a", "b")
    name, _, pid = next(note.process for note in job.workers().values() if note.node == "b")

    cluster.nodes["a"].kill(signal.SIGTERM, -1)  # all processes, as SLURM does
    job.until(lambda: f"exit code {128 + signal.SIGTERM}\n" in job.log("a"))
    cluster.unplug(STORE)

    job.until(lambda: not cluster.nodes[name].is_running(pid), TTL_S + 10)
    job.until(lambda: f"exit code {FENCED}\n" in job.log("b"))


def test_nodes_that_reach_the_store_and_not_each_other_end_the_job(cluster: Cluster) -> None:
    for name in "ab":
        cluster.up(name)
    cluster.separate("a", "b")
    job = Job(cluster, replace(SMALL, max_idle_attempts=2))

    job.start(STORE, "a", "b")

    assert job.codes() == dict.fromkeys((STORE, "a", "b"), 1), job.report()
    assert "4 attempts in a row failed" in job.log("a")


def test_the_disk_of_a_lost_node_is_replaced_by_the_copies_of_its_clique(cluster: Cluster) -> None:
    job = started(cluster, replace(SMALL, save_every=5), "a", "b")
    job.until(lambda: job.step() >= 12)
    stopped = time.monotonic()

    for name in (STORE, "a", "b"):
        cluster.crash(name)
    cluster.up("b", keeps_disk=False)
    job.start(STORE, "a", "b")

    reached = min(note.step for note in job.workers().values())
    job.go_on(stopped)
    job.require_right()
    loaded = {n.rank: n.step for n in job.read() if n.at > stopped and n.what == "disk"}
    # The save of the step that all have done, or the next one that was whole by then.
    newest = (reached - 1) // 5 * 5
    assert loaded in ({0: newest, 1: newest}, {0: newest + 5, 1: newest + 5})
