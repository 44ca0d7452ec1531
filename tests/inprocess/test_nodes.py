"""Nodes of a job as commands: agents that die, stop, or lose the store; and their ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.errors import StorageError
from tests.support.ports import HOST, free_port
from tests.support.processes import is_running, until
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parents[2]
LIMIT_S = 200
TTL_S = 8.0

WAITS = """
import os, sys, time
from pathlib import Path
if "RANK" not in os.environ:
    from dist_ckpt_strategies.inprocess.train_utils import wait_rank
    Path(f"spare.{os.getpid()}").touch()
    wait_rank()
Path(f"rank{os.environ['RANK']}.{os.getpid()}").touch()
while not Path("go").exists():
    time.sleep(0.02)
print(*(os.environ[name] for name in sys.argv[1:]))
"""
NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]

TRAINS = """
import os, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper
from dist_ckpt_strategies.inprocess.train_utils import wait_rank

if "RANK" not in os.environ:
    Path(f"spare.{os.getpid()}").touch()
wait_rank()

@HPWrapper(barrier_timeout_s=150)
def block(call: HPCallWrapper):
    dist.init_process_group("interruptible_gloo", timeout=timedelta(seconds=900))
    is_over = torch.zeros(1)
    while not is_over:
        dist.all_reduce(torch.ones(1))
        dist.broadcast(is_over := torch.tensor([float(Path("go").exists())]), 0)
        Path(f"rank{os.environ['RANK']}.{os.getpid()}").touch()
    return call.num_attempts

print("pid", os.getpid(), "attempts", block())
"""


class Cluster:
    """Agents of one job on this machine; their output goes to files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.endpoint = f"{HOST}:{free_port()}"
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, body: str = WAITS) -> subprocess.Popen[bytes]:
        script = self.directory / "script.py"
        script.write_text(body)
        tail = [] if "--store-only" in options else [str(script), *NAMES]
        job = ["--nproc_per_node", "1", "--rdzv-endpoint", self.endpoint, "--node-ttl", str(TTL_S)]
        path = self.directory / f"out.{len(self.agents)}"
        variables = {"PYTHONPATH": str(ROOT), "RES_OPTIONS": "attempts:0"}
        with path.open("wb") as out:
            agent = subprocess.Popen(
                [sys.executable, "-m", "dist_ckpt_strategies.cli", "run", *job, *options, *tail],
                cwd=self.directory,
                env=os.environ | variables | {"GLOO_SOCKET_IFNAME": "lo"},
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.agents.append(agent)
        return agent

    def start_first(self, *options: str, body: str = WAITS) -> subprocess.Popen[bytes]:
        """The agent that has the store, as any agent of this machine could."""
        agent = self.start(*options, body=body)
        until(self._has_store)
        return agent

    def _has_store(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, int(self.endpoint.rpartition(":")[2]))) == 0

    def worker(self, name: str) -> int:
        """The process that has come so far under a name, once it has; only the first one."""
        return until(lambda: self.workers(name))[0]

    def workers(self, name: str) -> list[int]:
        return [int(path.suffix[1:]) for path in self.directory.glob(f"{name}.*")]

    def go(self) -> None:
        (self.directory / "go").touch()

    def output(self, agent: subprocess.Popen[bytes]) -> str:
        return (self.directory / f"out.{self.agents.index(agent)}").read_text()

    def end_of(self, agent: subprocess.Popen[bytes]) -> int:
        try:
            return agent.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail("\n".join(map(self.output, self.agents)))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    for agent in found.agents:
        agent.kill()
        agent.wait()
    pids = [int(path.suffix[1:]) for path in tmp_path.glob("*.[0-9]*") if "out" not in path.name]
    until(lambda: not any(map(is_running, pids)))


def test_a_lost_node_is_replaced_by_a_spare_one_and_the_other_process_stays(
    cluster: Cluster,
) -> None:
    job = ("--nnodes", "2", "--spare-nodes", "1")
    first = cluster.start_first(*job, "--node-rank", "0", body=TRAINS)
    lost = cluster.start(*job, "--node-rank", "1", body=TRAINS)
    stays = cluster.worker("rank0")
    spare = cluster.start(*job, body=TRAINS)
    cluster.worker("spare")

    lost.kill()
    until(lambda: len(cluster.workers("rank1")) == 2)
    cluster.go()

    assert [cluster.end_of(agent) for agent in (first, spare)] == [0, 0]
    assert f"[0] pid {stays} attempts 2\n" in cluster.output(first)
    assert re.search(r"\[1\] pid \d+ attempts 1\n", cluster.output(spare))
    assert re.search(
        r"place 1: node \S+:" + str(lost.pid) + " no longer renews its place", cluster.output(spare)
    )


def test_a_stopped_agent_loses_its_workers_before_its_place_and_is_out_once_it_goes_on(
    cluster: Cluster,
) -> None:
    job = ("--nnodes", "1", "--spare-nodes", "1")
    store = cluster.start_first("--store-only", *job)
    stopped = cluster.start(*job)
    worker = cluster.worker("rank0")
    spare = cluster.start(*job, "--log-dir", "logs", "--tee", "1")
    cluster.worker("spare")

    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: not is_running(worker))
    assert len(cluster.workers("rank0")) == 1
    until(lambda: len(cluster.workers("rank0")) == 2)
    os.kill(stopped.pid, signal.SIGCONT)

    assert cluster.end_of(stopped) == 88
    cluster.go()
    assert [cluster.end_of(agent) for agent in (spare, store)] == [0, 0]
    assert f"[0] 0 0 1 1 0 {HOST}\n" in cluster.output(spare)
    (log,) = cluster.directory.glob("logs/none_*/attempt_0/0/stdout.log")
    assert log.read_text() == f"0 0 1 1 0 {HOST}\n"


def test_all_agents_end_when_the_store_is_silent(cluster: Cluster) -> None:
    job = ("--nnodes", "2")
    store = cluster.start_first("--store-only", *job)
    agents = [cluster.start(*job) for _ in range(2)]
    workers = [cluster.worker(f"rank{rank}") for rank in range(2)]

    begun = time.monotonic()
    os.kill(store.pid, signal.SIGSTOP)

    until(lambda: not any(map(is_running, workers)))
    assert time.monotonic() - begun < TTL_S + 10.0  # half of it, on a machine with nothing to do
    assert [cluster.end_of(agent) for agent in agents] == [88, 88]


def test_a_dead_worker_is_replaced_alone_and_too_many_of_all_nodes_end_the_job(
    cluster: Cluster,
) -> None:
    job = ("--nnodes", "2", "--max-restarts", "1")
    agents = [cluster.start(*job, "--node-rank", str(number)) for number in range(2)]
    workers = [cluster.worker(f"rank{rank}") for rank in range(2)]

    late = cluster.start("--store-only", *job)

    os.kill(workers[0], signal.SIGKILL)
    until(lambda: len(cluster.workers("rank0")) == 2)
    assert is_running(workers[1])
    assert cluster.end_of(late) == 0
    assert "another agent of this machine hosts the store" in cluster.output(late)
    os.kill(workers[1], signal.SIGKILL)

    assert [cluster.end_of(agent) for agent in agents] == [1, 1]
    for agent in agents:
        assert "2 workers have died (rank 1 1x), 1 restarts are allowed" in cluster.output(agent)


def test_a_node_that_is_missing_ends_the_others_with_a_code_of_its_own(cluster: Cluster) -> None:
    agent = cluster.start("--nnodes", "2", "--node-wait", "1", "--node-rank", "0")
    worker = cluster.worker("rank0")

    assert cluster.end_of(agent) == 87
    assert not is_running(worker)
    assert "place 1: no node has come" in cluster.output(agent)


def test_an_agent_that_leaves_hands_over_and_those_that_do_not_fit_are_refused(
    cluster: Cluster,
) -> None:
    job = ("--nnodes", "1", "--spare-nodes", "1")
    store = cluster.start_first("--store-only", *job)
    leaves = cluster.start(*job)
    cluster.worker("rank0")
    spare = cluster.start(*job)
    cluster.worker("spare")

    other = cluster.start("--nnodes", "2", "--spare-nodes", "1")
    too_many = cluster.start(*job, "--node-wait", "1")
    assert [cluster.end_of(agent) for agent in (other, too_many)] == [2, 1]
    assert re.search(r"another job(?s:.*)--nnodes", cluster.output(other))
    assert "1 places and those of 1 spare nodes" in cluster.output(too_many)

    leaves.terminate()
    until(lambda: len(cluster.workers("rank0")) == 2)
    cluster.go()
    assert [cluster.end_of(agent) for agent in (leaves, spare, store)] == [143, 0, 0]


def test_a_commit_without_its_place_fails_on_all_ranks(tmp_path: Path) -> None:
    host = host_store()
    JobStore(host.host, host.port).set("place/0", "other#7")

    found = run_processes(2, _save_as_lost, f"{host.host}:{host.port}", tmp_path)

    assert all("place/0 of the job was node lost's, and is other's now" in text for text in found)
    assert not list(tmp_path.glob("**/metadata.json"))


def _save_as_lost(_rank: int, address: str, directory: Path) -> str:
    os.environ |= {"DIST_CKPT_COORDINATOR": address, "DIST_CKPT_PLACE": "place/0=lost"}
    with pytest.raises(StorageError) as caught:
        dist_ckpt_strategies.save({"step": 1}, directory)
    return str(caught.value)
