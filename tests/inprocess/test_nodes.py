"""Nodes of a job as commands: agents that stop, leave, or do not fit; lost nodes: tests/cluster."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.errors import StorageError
from tests.inprocess.agents import Agents
from tests.support.ports import HOST
from tests.support.processes import is_running, until
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

WAITS = """
if rank is None:
    from dist_ckpt_strategies.inprocess.train_utils import wait_rank
    wait_rank()
    Path(f"rank{os.environ['RANK']}.{os.getpid()}").touch()
Path(f"job {os.environ['DIST_CKPT_JOB']}").touch()
wait_for("go", 600)
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
print(*map(os.environ.get, names))
"""


def test_a_stopped_agent_loses_its_workers_before_its_place_and_is_out_once_it_goes_on(
    agents: Agents,
) -> None:
    job = ("--nnodes", "1", "--spare-nodes", "1")
    store = agents.start_node(WAITS, "--store-only", *job)
    stopped = agents.start_node(WAITS, *job)
    worker = agents.worker("rank0")
    spare = agents.start_node(WAITS, *job, "--log-dir", "logs", "--tee", "1")
    agents.worker("spare")

    os.kill(stopped.pid, signal.SIGSTOP)
    until(lambda: not is_running(worker))
    assert len(agents.pids("rank0")) == 1
    until(lambda: len(agents.pids("rank0")) == 2)
    os.kill(stopped.pid, signal.SIGCONT)

    assert agents.code(stopped) == 88
    agents.go()
    assert [agents.code(agent) for agent in (spare, store)] == [0, 0]
    assert f"[0] 0 0 1 1 0 {HOST}\n" in agents.output(spare)
    (log,) = agents.directory.glob("logs/none_*/attempt_0/0/stdout.log")
    assert log.read_text() == f"0 0 1 1 0 {HOST}\n"


def test_a_dead_worker_is_replaced_alone_and_too_many_of_all_nodes_end_the_job(
    agents: Agents,
) -> None:
    job = ("--nnodes", "2", "--max-restarts", "1")
    nodes = [agents.join(WAITS, *job, "--node-rank", str(number)) for number in range(2)]
    workers = [agents.worker(f"rank{rank}") for rank in range(2)]

    late = agents.start_node(WAITS, "--store-only", *job)

    os.kill(workers[0], signal.SIGKILL)
    until(lambda: len(agents.pids("rank0")) == 2)
    assert is_running(workers[1])
    assert len(list(agents.directory.glob("job *"))) == 1
    assert agents.code(late) == 0
    assert "another agent of this machine hosts the store" in agents.output(late)
    os.kill(workers[1], signal.SIGKILL)

    for node in nodes:
        assert agents.code(node) == 1
        assert "2 workers have died (rank 1 1x), 1 restarts are allowed" in agents.output(node)


def test_a_node_that_is_missing_ends_the_others_with_a_code_of_its_own(agents: Agents) -> None:
    agent = agents.start_node(WAITS, "--nnodes", "2", "--node-wait", "1", "--node-rank", "0")
    worker = agents.worker("rank0")

    assert agents.code(agent) == 87
    assert not is_running(worker)
    assert "place 1: no node has come" in agents.output(agent)


def test_a_lost_node_ends_a_job_whose_script_makes_groups_outside_of_the_wrapper(
    agents: Agents,
) -> None:
    body = """
import torch.distributed as dist
dist.init_process_group("gloo")
Path(f"joined{rank}.{os.getpid()}").touch()
wait_for("never")
"""
    first, lost = (agents.start_node(body, "--nnodes", "2", "--node-rank", n) for n in "01")
    for rank in range(2):
        agents.worker(f"joined{rank}")

    lost.kill()

    assert agents.code(first) == 1
    assert re.search(r"no longer renews(?s:.*)start the script with torchrun", agents.output(first))


def test_an_agent_that_leaves_hands_over_and_those_that_do_not_fit_are_refused(
    agents: Agents,
) -> None:
    job = ("--nnodes", "1", "--spare-nodes", "1")
    store = agents.start_node(WAITS, "--store-only", *job)
    leaves = agents.start_node(WAITS, *job)
    agents.worker("rank0")
    spare = agents.start_node(WAITS, *job)
    agents.worker("spare")

    other = agents.start_node(WAITS, "--nnodes", "2", "--spare-nodes", "1")
    too_many = agents.start_node(WAITS, *job, "--node-wait", "1")
    assert [agents.code(agent) for agent in (other, too_many)] == [2, 1]
    assert re.search(r"another job(?s:.*)--nnodes", agents.output(other))
    for end in ("one may get free within 1 s", "raise --spare-nodes"):
        assert f"1 places and those of 1 spare nodes are taken by other nodes; {end}" in (
            agents.output(too_many)
        )

    leaves.terminate()
    until(lambda: len(agents.pids("rank0")) == 2)
    agents.go()
    assert [agents.code(agent) for agent in (leaves, spare, store)] == [143, 0, 0]


LEAVES = """
from dist_ckpt_strategies.inprocess import HPWrapper
from dist_ckpt_strategies.inprocess.train_utils import wait_rank
wait_rank()
rank = os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: Path("preempted").touch())
@HPWrapper()
def train():
    if Path("saved").exists():
        return
    Path(f"trains{rank}.{os.getpid()}").touch()
    wait_for("preempted", 600)
    Path(f"leaves {rank}").touch()
    for other in range(2): wait_for(f"leaves {other}")
    Path("saved").touch()
    sys.exit(143)
train()
"""
"""All ranks save and leave, as the manager has them do; the next processes have no more to do."""


@pytest.mark.parametrize("has_spare", [True, False])
def test_an_evicted_node_hands_over_or_ends_the_job_and_no_rank_counts_as_dead(
    has_spare: bool, agents: Agents
) -> None:
    job = ("--nnodes", "2", "--spare-nodes", "1", "--max-restarts", "0")
    store = agents.start_node(LEAVES, "--store-only", *job)
    evicted, other = (agents.join(LEAVES, *job, "--node-rank", n) for n in "01")
    for rank in range(2):
        agents.worker(f"trains{rank}")
    spares = [agents.join(LEAVES, *job)] if has_spare else []
    if has_spare:
        until(lambda: len(agents.pids("spare")) >= 1)

    evicted.terminate()

    codes = [agents.code(one) for one in (evicted, other, *spares, store)]
    assert codes == ([143, 0, 0, 0] if has_spare else [143, 143, 143]), agents.output(other)


def test_a_node_whose_ranks_return_after_a_signal_with_all_others_ends_the_job_at_once(
    agents: Agents,
) -> None:
    # The host of the store would wait for a node that says nothing for as long as its ranks may.
    job = ("--nnodes", "2", "--shutdown-timeout", "600")
    body = LEAVES.replace("sys.exit(143)", "return")
    store = agents.start_node(body, "--store-only", *job)
    told, other = (agents.join(body, *job, "--node-rank", n) for n in "01")
    for rank in range(2):
        agents.worker(f"trains{rank}")

    told.terminate()

    assert [agents.code(one) for one in (told, other, store)] == [143, 143, 143]
    assert "was asked to end" in agents.output(other)


def test_a_spare_node_that_is_told_to_end_starts_nothing_in_a_place_that_it_gets_by_then(
    agents: Agents,
) -> None:
    body = """
def leave(*_):
    Path(f"told.{os.getpid()}").touch()
    try: os.mkdir("one has left")
    except FileExistsError: wait_for("leave")
    os._exit(143)
signal.signal(signal.SIGTERM, leave if rank is None else signal.SIG_DFL)
wait_for("never", 600)
"""
    job = ("--nnodes", "1", "--spare-nodes", "1")
    agents.start_node(body, "--store-only", *job)
    first = agents.start_node(body, *job)
    agents.worker("rank0")
    spare = agents.join(body, *job, "--spares", "1")
    until(lambda: len(agents.pids("spare")) == 2)

    spare.terminate()
    until(lambda: len(agents.pids("told")) == 2)
    first.terminate()
    until(lambda: "this node has place 0" in agents.output(spare))
    (agents.directory / "leave").touch()

    assert agents.code(spare) == 143
    assert len(agents.pids("spare")) == 2


def test_a_store_that_is_asked_to_end_stays_until_the_ranks_have_saved(agents: Agents) -> None:
    body = """
def save(*_):
    Path("asked").touch()
    wait_for("go")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
Path(f"up.{os.getpid()}").touch()
wait_for("never", 600)
"""
    store = agents.start_node(body, "--store-only", "--nnodes", "1")
    node = agents.start_node(body, "--nnodes", "1")
    worker = agents.worker("up")

    store.terminate()
    until((agents.directory / "asked").exists)
    time.sleep(10.0)  # longer than a node without the store keeps its workers
    assert is_running(worker)
    agents.go()

    assert [agents.code(agent) for agent in (node, store)] == [143, 143]


def test_a_commit_without_its_place_fails_on_all_ranks(tmp_path: Path) -> None:
    host = host_store()
    JobStore(host.host, host.port).set("place/0", "other#7")

    found = run_processes(2, _save_as_lost, f"{host.host}:{host.port}", tmp_path)

    assert all("place/0 of the job was node lost's, and is other's now" in text for text in found)
    assert not list(tmp_path.glob("**/metadata.json"))


def _save_as_lost(_rank: int, address: str, directory: Path) -> str:
    os.environ |= {"DIST_CKPT_RENDEZVOUS": address, "DIST_CKPT_PLACE": "place/0=lost"}
    with pytest.raises(StorageError) as caught:
        dist_ckpt_strategies.save({"step": 1}, directory)
    return str(caught.value)
