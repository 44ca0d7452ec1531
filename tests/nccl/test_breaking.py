"""Aborts and lost peers: cases that would hang, or return garbage, if NCCL's rules were broken."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.nn.parallel import DistributedDataParallel

from dist_ckpt_strategies.comm.base import run_and_gather, run_collectively
from dist_ckpt_strategies.comm.step_commit import StepCommit
from dist_ckpt_strategies.comm.teardown import Communication
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.device import RELEASED
from dist_ckpt_strategies.inprocess.abort import CheckpointlessAbortManager
from dist_ckpt_strategies.inprocess.launch import outlive_nccl_errors
from dist_ckpt_strategies.integrations.nemo import guard_optimizer
from dist_ckpt_strategies.local import BasicTensorAwareStateDict, LocalCheckpointManager
from dist_ckpt_strategies.recovery import (
    CheckpointManager,
    PEFTCheckpointManager,
    Phase,
    TorchStateProvider,
)
from dist_ckpt_strategies.recovery.provider import HeldTensors, ReplicatedState
from tests.local.clique_worlds import cliques, load, manager_of, state_of
from tests.support.entries import Failure, outcome
from tests.support.nccl_rules import NcclRules, join_nccl, use_nccl
from tests.support.ranks import run_processes
from tests.support.restarts import Wrappers, join_group, run_respawned

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
        assert ("PeerLostError" in found.kinds, RELEASED in found.text) == (True, True), found


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

    for one in (found, later):
        assert ("PeerLostError" in one.kinds, RELEASED in one.text) == (True, True), one


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


def commit_after_a_long_step(rank: int) -> Any:
    """The GPU of rank 1 is busy for longer than ranks wait for each other."""
    join_nccl()
    state = HeldTensors(lambda: {"p": {"x": torch.ones(2, device="cuda")}}, objects={})
    manager = CheckpointManager(timeout_s=2)
    manager.track(state)
    manager.begin_step()
    if rank:
        time.sleep(4)
    dist.all_reduce(torch.ones(4, device="cuda"), async_op=True).wait()
    manager.vote()
    return manager.phase


def test_what_the_gpu_has_yet_to_do_does_not_count_as_a_wait_for_peers() -> None:
    assert run(2, commit_after_a_long_step) == [Phase.COMMITTED] * 2


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
        comm.exchange([(1, mine)], [])
    elif rank == 1:
        comm.exchange([], [(0, found)])
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


class Faults:
    """In some attempts, when a place is reached for the n-th time, this rank raises or dies."""

    def __init__(self, planned: dict[int, tuple[str, str, int]]) -> None:
        self._planned, self.attempt, self._counts = planned, 0, Counter[str]()

    def begin(self) -> None:
        self.attempt += 1
        self._counts.clear()

    def come(self, place: str) -> None:
        self._counts[place] += 1
        what, *where = self._planned.get(self.attempt, ("", place, 0))
        if where == [place, self._counts[place]]:
            if what == "die":
                os._exit(9)
            if what == "raise once rank 3 has updated":
                default_store().wait([f"3 has updated {self._counts[place]}"])
            raise ValueError("on purpose")


class Sharded(ReplicatedState):
    """Two instances of an optimizer with two shards; the weights are gathered in each."""

    def __init__(self, rank: int, faults: Faults) -> None:
        super().__init__()
        instances = [dist.new_group(ranks, backend="nccl") for ranks in ([0, 1], [2, 3])]
        self._group, self._name, self._faults = instances[rank // 2], f"shard/{rank % 2}", faults
        self.shard = torch.full((2,), 10.0 * (rank % 2), device="cuda")
        self.weights = [torch.full((2,), 10.0 * number, device="cuda") for number in range(2)]
        dist.barrier(group=self._group)

    def parts(self) -> Any:
        weights = {str(number): one for number, one in enumerate(self.weights)}
        return {"weights": weights, self._name: {"x": self.shard}}

    def gathered_parts(self) -> frozenset[str]:
        return frozenset({"weights"})

    def objects(self) -> dict[str, Any]:
        return {}

    def load_objects(self, objects: Any) -> None: ...

    def apply_update(self) -> None:
        self.shard.add_(1.0)
        self._faults.come("update")

    update_shard = apply_update

    def finish_gradients(self) -> bool:
        return True

    def gather_weights(self) -> None:
        """As Megatron-Core: the host does not wait."""
        self._faults.come("gather")
        dist.all_gather(self.weights, self.shard, group=self._group)

    def values(self) -> list[float]:
        torch.cuda.synchronize()
        return [one.tolist()[0] for one in (*self.weights, self.shard)]


def train_through(  # noqa: PLR0915 - a script's block
    rank: int, wrapper: Wrappers, planned: dict[int, dict[int, tuple[str, str, int]]], how: str
) -> Any:
    """What the ranks have after each recovery, and at the end; whoever raises loses its state."""
    use_nccl()
    is_first = wrapper.worker.endswith(".1")
    faults = Faults(planned.get(rank, {}) if is_first else {})
    manager = CheckpointManager(how == "checksum", timeout_s=30)
    recovered: list[Any] = []

    @wrapper(
        abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
        checkpoint_manager=manager,
    )
    def block() -> Any:
        faults.begin()
        with suppress(dist.DistBackendError):  # of the attempt before, which CUDA would not tell
            torch.cuda.synchronize()
        join_group("nccl" if how == "synchronous" else MIXED)
        own, optimizer = Sharded(rank, faults), SimpleNamespace()
        try:
            if manager.try_checkpointless_load(own) is not None:
                recovered.append((own.step, own.values()))
            manager.track(own)
            guard_optimizer(optimizer, cast("Any", own), manager)
            while own.step < 3:
                step(own, optimizer)
        except ValueError:
            manager.delete_checkpoint()
            raise
        return own.step, own.values()

    def step(own: Sharded, optimizer: Any) -> None:
        manager.begin_step()
        dist.all_reduce(torch.ones(4, device="cuda"))
        if how == "guarded":
            optimizer.step()
            torch.cuda.synchronize()  # as Megatron-LM, which asks whether all have updated
            manager.end_update()
            default_store().set(f"{rank} has updated {own.step + 1}", "")
        else:
            manager.vote()
            with manager.updating():
                own.apply_update()
            own.gather_weights()
            if how == "synchronous":
                torch.cuda.synchronize()
        manager.end_step()

    return block(), recovered


BEFORE_THE_GATHER = {1: {1: ("raise", "gather", 2)}}
UPDATED_ELSEWHERE = {1: {1: ("raise once rank 3 has updated", "gather", 2)}}
IN_THE_UPDATE = {3: {1: ("raise", "update", 2)}}
IN_A_RECOVERY = BEFORE_THE_GATHER | {2: {2: ("die", "gather", 1)}}  # the first of its attempt


@pytest.mark.parametrize(
    ("planned", "how"),
    [
        (BEFORE_THE_GATHER, "plain"),
        (UPDATED_ELSEWHERE, "guarded"),  # whose state counts once all of the step is over
        (BEFORE_THE_GATHER, "synchronous"),
        (IN_THE_UPDATE, "plain"),
        (IN_A_RECOVERY, "checksum"),
    ],
)
def test_weights_whose_gather_was_aborted_are_gathered_by_the_recovery(
    planned: Any, how: str
) -> None:
    """NCCL ends the gather of the survivor in the instance of the lost rank, with garbage."""
    results, _ = run_respawned(4, train_through, planned, how, timeout_s=LIMIT_S)

    for rank, (end, recovered) in enumerate(results):
        assert recovered == [(2, [2.0, 12.0, 2.0 + 10.0 * (rank % 2)])]
        assert end == (3, [3.0, 13.0, 3.0 + 10.0 * (rank % 2)])


def rely_on_pending_work(rank: int, what: str, root: str) -> Any:
    """Rank 1 never takes part in the broadcast that fills a tensor of rank 0."""
    join_nccl()
    alone = dist.new_group([rank], backend="nccl")
    loaded = torch.ones(4, device="cuda")
    parameter = torch.nn.Parameter(loaded, requires_grad=False)
    state, other = (HeldTensors(lambda: {"p": {"x": parameter}}, objects={}) for _ in range(2))
    manager = PEFTCheckpointManager(enable_checksum=True, timeout_s=30)
    manager.track(state)
    if what == "end_update":
        manager.begin_step()
        manager.vote()
        manager.begin_update()
    dist.barrier()
    if rank:
        return None
    actions: dict[str, Callable[[], Any]] = {
        "track": lambda: manager.track(other),
        "save_checkpoint": lambda: manager.save_checkpoint(other),
        "base model": lambda: PEFTCheckpointManager().maybe_save_base_model(other),
        "checksums": lambda: manager.save_checkpoint(state),
        "end_update": manager.end_update,
        "local save": lambda: LocalCheckpointManager(root, group=alone).save(
            BasicTensorAwareStateDict({"x": loaded}), 1
        ),
    }
    dist.broadcast(loaded, 1, async_op=True).wait()
    ending = threading.Timer(0.5, Communication().end)
    ending.start()
    if what == "end_update":
        torch.cuda.synchronize()
    found = outcome(actions[what])
    ending.join()
    return found, manager.phase, list(Path(root).glob("**/iter_*_local_*"))


@pytest.mark.parametrize(
    ("what", "phase"),
    [
        ("save_checkpoint", Phase.RUNNING),
        ("base model", Phase.RUNNING),
        ("checksums", Phase.RUNNING),
        ("local save", Phase.RUNNING),
        ("end_update", Phase.UPDATING),
    ],
)
def test_nothing_is_kept_or_saved_of_what_an_aborted_collective_has_filled(
    what: str, phase: Phase, tmp_path: Path
) -> None:
    (found, after, files), _ = run(2, rely_on_pending_work, what, str(tmp_path))

    assert isinstance(found, Failure), found
    assert ("PeerLostError" in found.kinds, RELEASED in found.text) == (True, True), found
    assert (after, files) == (phase, [])


def normalise_behind_a_broadcast(rank: int, num_steps: int) -> Any:
    """DistributedDataParallel's forward begins with the buffers of rank 0, which never comes."""
    join_nccl()
    module = torch.nn.BatchNorm1d(2)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(parameter.detach().cuda()))
    for name, buffer in list(module.named_buffers()):
        setattr(module, name, buffer.cuda())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    state, manager = TorchStateProvider(module, optimizer), CheckpointManager(timeout_s=30)
    manager.track(state)
    parallel = DistributedDataParallel(module, init_sync=False)
    communication = Communication()

    def step(is_last: bool) -> Any:
        manager.begin_step()
        if is_last and rank == 0:
            return None
        before = [tensor.tolist() for tensor in state.parts()["model"].values()]
        ending = threading.Timer(0.5 if is_last else 1e6, communication.end)
        ending.daemon = True
        ending.start()
        parallel.require_forward_param_sync = True  # as a forward with gradients sets it
        with torch.no_grad():
            parallel(torch.full((3, 2), 5.0 + rank, device="cuda"))
        torch.cuda.synchronize()
        if is_last:
            ending.join()
            return before, [tensor.tolist() for tensor in state.parts()["model"].values()]
        manager.vote()
        with manager.updating():
            state.apply_update()
        return manager.end_step()

    for _ in range(num_steps):
        step(is_last=False)
    return step(is_last=True)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_buffers_behind_an_aborted_broadcast_are_those_of_the_steps_beginning(
    num_steps: int,
) -> None:
    _, (before, after) = run(2, normalise_behind_a_broadcast, num_steps)

    assert after == before
