"""Aborts and lost peers: cases that would hang, or return garbage, if NCCL's rules were broken."""

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.base import Receive, Send, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.step_commit import StepCommit
from dist_ckpt_strategies.comm.teardown import Communication
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import outlive_nccl_errors
from tests.local.clique_worlds import cliques, load, manager_of, state_of
from tests.support.entries import Failure, outcome
from tests.support.nccl_rules import NcclRules, join_nccl, use_nccl
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

LIMIT_S = 60.0
MIXED = "cpu:gloo,cuda:nccl"


def run(size: int, body: Any, *args: Any) -> list[Any]:
    return run_processes(size, body, *args, timeout_s=LIMIT_S)


def abort_before_the_gradients(rank: int, world: str, first: str) -> Any:
    """Rank 2 never reduces its gradients; the aborts of the groups are half a second apart."""
    (join_nccl if world == "nccl" else use_nccl)(separate_queues=True)
    gradients: Any = dist.group.WORLD if world == "nccl" else dist.new_group(backend="nccl")
    voters: Any = dist.new_group([0, 1], backend=world)
    dist.barrier(group=gradients)
    if rank == 2:
        return None
    commit = StepCommit(voters, timeout_s=30)
    assert commit.should_commit(5)
    last = voters if first == "gradients" else gradients
    NcclRules.abort_delay_s[last.group_name] = 0.5
    dist.all_reduce(torch.ones(4, device="cuda"), group=gradients, async_op=True).wait()
    ending = threading.Timer(0.5, Communication().end)
    ending.start()
    found = outcome(lambda: commit.should_commit(6))
    ending.join()
    return found


@pytest.mark.parametrize(
    ("world", "first"), [("nccl", "gradients"), ("nccl", "commit"), ("gloo", "commit")]
)
def test_a_step_whose_gradients_were_aborted_is_not_committed(world: str, first: str) -> None:
    for found in run(3, abort_before_the_gradients, world, first)[:2]:
        assert isinstance(found, Failure), found
        assert "WaitReleasedError" in found.kinds, found


def abort_under_a_collective(rank: int, what: str) -> Any:
    """Rank 0 is in a collective that rank 1 never reaches when communication is ended."""
    join_nccl()
    commit = StepCommit(timeout_s=30)
    assert commit.should_commit(6)
    assert commit.replicate(b"of rank %d" % rank) == {1 - rank: b"of rank %d" % (1 - rank)}
    if rank:
        return None
    ending = threading.Timer(0.5, Communication().end)
    ending.start()
    actions = {
        "commit": lambda: commit.should_commit(7),
        "replicate": lambda: commit.replicate(b""),
    }
    found = outcome(actions[what])
    ending.join()
    return found, outcome(lambda: commit.should_commit(7))


@pytest.mark.parametrize("what", ["commit", "replicate"])
def test_the_output_of_an_aborted_collective_is_not_used(what: str) -> None:
    (found, later), _ = run(2, abort_under_a_collective, what)

    assert "WaitReleasedError" in found.kinds, found
    assert "WaitReleasedError" in later.kinds, later


def make_a_group_late(rank: int) -> Any:
    """Between two rounds of the abort."""
    join_nccl()

    def reduce(group: Any) -> Any:
        return dist.all_reduce(torch.ones(4, device="cuda"), group=group)

    reduce(dist.group.WORLD)
    communication = Communication()
    before = dist.new_group([0, 1], backend="nccl")
    communication.cut()
    dist.destroy_process_group(before)
    late = dist.new_group([0, 1], backend="nccl")
    reduce(late)
    communication.cut()
    return [outcome(partial(reduce, group)) for group in (dist.group.WORLD, late)]


def test_groups_that_are_made_during_the_abort_are_aborted_too() -> None:
    for found in run(2, make_a_group_late):
        assert all("was aborted" in failure.text for failure in found), found


def abort_groups_behind_each_other(rank: int) -> Any:
    """Rank 1 never reduces; the first group's work is behind that of the second."""
    NcclRules.stuck_s = 5.0
    join_nccl()
    groups = [dist.new_group([0, 1], backend="nccl") for _ in range(2)]
    for group in groups:
        dist.barrier(group=group)
    if rank == 0:
        for group in reversed(groups):
            dist.all_reduce(torch.ones(4, device="cuda"), group=group, async_op=True)
    return outcome(Communication().end), NcclRules.broken


def test_groups_whose_works_wait_for_each_other_are_aborted_together() -> None:
    assert run(2, abort_groups_behind_each_other) == [(None, None)] * 2


def commit_without_a_peer(rank: int) -> Any:
    join_nccl()
    gradients = dist.new_group([0, 1], backend="nccl")
    commit = StepCommit(timeout_s=4)
    dist.barrier(group=gradients)
    if rank:
        return None
    dist.all_reduce(torch.ones(4, device="cuda"), group=gradients, async_op=True).wait()
    return outcome(lambda: commit.should_commit(6))


def test_a_commit_waits_for_gradients_no_longer_than_its_limit() -> None:
    found, _ = run(2, commit_without_a_peer)

    assert "PeerTimeoutError" in found.kinds, found
    assert "step 6" in found.text
    assert found.seconds < 30


def save_in_the_background(rank: int, root: str, target_device: str) -> Any:
    """Beside the all_reduces of a training, all in one queue."""
    join_nccl(MIXED)
    manager = manager_of(rank, root, cliques(target_device=target_device))
    started = outcome(lambda: manager.save(state_of(rank, 10), 10, is_async=True))
    for _ in range(20):
        dist.all_reduce(torch.ones(1000, device="cuda"))
        torch.cuda.synchronize()
    if isinstance(started, Failure):
        return started
    started.wait(30)
    return load(manager, rank)


def test_a_local_save_in_the_background_goes_over_gloo_only(tmp_path: Path) -> None:
    for refused in run(4, save_in_the_background, str(tmp_path / "cuda"), "cuda"):
        assert isinstance(refused, Failure), refused
        assert "StrategyError" in refused.kinds, refused
        assert "target_device='cpu'" in refused.text

    assert run(4, save_in_the_background, str(tmp_path / "cpu"), "cpu") == [("ok", "10")] * 4


def exchange_first(rank: int, backend: str, num_channels: int) -> Any:
    """Two of three ranks carry bytes from GPU to GPU, the first that NCCL does in their groups."""
    join_nccl(backend)
    channels = [dist.new_group(backend=backend) for _ in range(num_channels)]
    comm = open_communicator(
        None,
        timeout_s=20,
        purpose="test",
        payload_device=torch.device("cuda", torch.cuda.current_device()),
        channels=channels,
    )
    run_collectively(comm, lambda: None)
    found = torch.zeros(3, dtype=torch.uint8, device="cuda")
    mine = torch.full((3,), 7, dtype=torch.uint8, device="cuda")
    if rank == 0:
        comm.exchange([Send(1, mine)], [])
    elif rank == 1:
        comm.exchange([], [Receive(0, found)])
    return run_and_gather(comm, found.tolist)[1]


@pytest.mark.parametrize(("backend", "num_channels"), [("nccl", 0), (MIXED, 0), ("nccl", 2)])
def test_the_first_exchange_may_be_one_of_few_ranks(backend: str, num_channels: int) -> None:
    assert run(3, exchange_first, backend, num_channels) == [[7, 7, 7]] * 3


def come_late(rank: int) -> Any:
    """Rank 1 reaches a collective after the others' limit."""
    join_nccl()
    comm = open_communicator(None, timeout_s=4, purpose="test")
    run_collectively(comm, lambda: None)
    if rank:
        time.sleep(6)
    return [outcome(lambda: run_collectively(comm, lambda: None)) for _ in range(2)]


def test_after_a_limit_the_group_is_aborted_and_the_late_rank_raises_too() -> None:
    for found in run(2, come_late):
        assert all(isinstance(one, Failure) for one in found), found
        assert {"PeerTimeoutError", "PeerLostError"} & set(found[0].kinds), found


def die(rank: int) -> Any:
    outlive_nccl_errors()
    join_nccl()
    commit = StepCommit(timeout_s=30)
    assert commit.should_commit(1)
    if rank == 2:
        os._exit(9)
    return outcome(lambda: commit.should_commit(2))


def test_survivors_of_a_dead_rank_get_an_error_where_the_wrapper_has_set_the_variable() -> None:
    for found in run(3, die)[:2]:
        assert "DistBackendError" in found.kinds, found
